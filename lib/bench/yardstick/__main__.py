"""``python -m lib.bench.yardstick`` compares this book's training with timm's."""

from lib.bench.yardstick.compare import main

if __name__ == "__main__":
    main()
