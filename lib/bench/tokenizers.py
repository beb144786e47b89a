"""Time our tokenizer beside Hugging Face tokenizers, tiktoken and SentencePiece, all on the same text.

Run ``python -m lib.bench.tokenizers`` (it needs the extra ``test``);
it writes ``chapters/measurements/tokenizers.json``.
"""

import io
import os
import time
from collections import Counter
from functools import partial

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # one core for each, as for ours; set before the import

import sentencepiece
import tiktoken
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from lib.bench.kit import measure as measure_with
from lib.bench.kit import record
from lib.given.data.corpora import language_reference, standard_library_docstrings
from lib.runs.flags import ProgramParser
from lib.tokenization import PRE_TOKEN, BPETokenizer, count_pairs, merge_pair, train_bpe

VOCAB_SIZES = (500, 1000, 2000, 4000)
SENTENCE = "Eiffel Tower is in Paris"
N_REPEATS = 9

measure = partial(measure_with, clock=time.process_time)  # each runs on one core; others may use the machine


def train_hugging_face(text: str, vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE with the same pre-tokenization."""
    peer = tokenizers.Tokenizer(models.BPE())
    peer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    peer.train_from_iterator([text], trainer)
    return peer


def train_sentencepiece(text: str, vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """SentencePiece as Llama 2 used it: BPE on characters, bytes for those that are rare."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text.splitlines()),
        model_writer=model,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def recount_seconds(text: str, n_merges: int) -> float:
    """Seconds per merge when all pairs are counted again after each merge, over the first ``n_merges``."""
    words = {tuple(bytes([b]) for b in word.encode()): n for word, n in Counter(PRE_TOKEN.findall(text)).items()}

    def run() -> None:
        current = words
        for _ in range(n_merges):
            pairs = count_pairs(current)
            best = max(pairs, key=lambda pair: (pairs[pair], pair))
            current = {merge_pair(symbols, best): n for symbols, n in current.items()}

    return measure(run, n_repeats=3, n_warmup=0)["median"] / n_merges


def training(text: str) -> dict:
    """Seconds of training on one core, for each size of vocabulary."""
    ours = {n: measure(lambda n=n: train_bpe(text, n), N_REPEATS, 1) for n in VOCAB_SIZES}
    theirs = {n: measure(lambda n=n: train_hugging_face(text, n), N_REPEATS, 1) for n in VOCAB_SIZES}
    pieces = {n: measure(lambda n=n: train_sentencepiece(text, n), N_REPEATS, 1) for n in VOCAB_SIZES}
    return {"ours_s": ours, "hugging_face_s": theirs, "sentencepiece_s": pieces}


def encoding(text: str, held_out: str) -> dict:
    """Encoding speed on the held-out text in megabytes per second, after one pass over it."""
    vocab, merges = train_bpe(text, 1000)
    ours = BPETokenizer(vocab, merges)
    ranks = {token: i for i, token in vocab.items()}
    peer = tiktoken.Encoding("ours", pat_str=PRE_TOKEN.pattern, mergeable_ranks=ranks, special_tokens={})
    hugging_face = train_hugging_face(text, 1000)
    n_megabytes = len(held_out.encode()) / 1e6
    assert ours.encode(held_out) == peer.encode(held_out)
    runs = {
        "ours": lambda: ours.encode(held_out),
        "ours_iterable": lambda: list(ours.encode_iterable(held_out.splitlines(keepends=True))),
        "tiktoken": lambda: peer.encode(held_out),
        "hugging_face": lambda: hugging_face.encode(held_out),
    }
    rates = {}
    for name, run in runs.items():
        seconds = measure(run, N_REPEATS, 1)
        ends = {"median": "median", "p10": "p90", "p90": "p10"}
        rates[name] = {end: n_megabytes / seconds[of] for end, of in ends.items()}
    return rates


def main() -> None:
    text, held_out = language_reference(), standard_library_docstrings()
    recount_s = recount_seconds(text, 5)
    pieces = {n: train_sentencepiece(text, n).encode(SENTENCE, out_type=str) for n in VOCAB_SIZES}
    record(
        "tokenizers",
        {
            "text_mb": len(text.encode()) / 1e6,
            "held_out_mb": len(held_out.encode()) / 1e6,
            "train": training(text),
            "recount_s_per_merge": recount_s,
            "encode_mb_per_s": encoding(text, held_out),
            "sentence": SENTENCE,
            "sentencepiece_pieces": pieces,
        },
    )


if __name__ == "__main__":
    ProgramParser(description=__doc__).parse_args()  # there are no flags: a word is refused before anything is measured
    main()
