"""What the chapters' cells run on ranks."""
