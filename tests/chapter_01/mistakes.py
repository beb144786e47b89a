"""Plausible wrong answers of chapter 1, and the misconception behind each."""

from collections import Counter
from itertools import pairwise
from typing import Any

from lib.workbook.grading import edits
from solutions import tokenization as reference

edits("""
# WordTokenizer
the words are numbered in the order of the text, not in sorted order
- sorted(set(text.lower().split())) => list(dict.fromkeys(text.lower().split()))
the words keep the order of a set, which differs from run to run: they are not sorted
- sorted => list
every new word gets the same id: the table does not remember the first
@@ encode
+ return [self.ids.get(word, len(self.ids)) for word in text.lower().split()]
a new word gets an id, but decode does not learn which word that is
- self.words[i] = word =>
The and the are two different words: the text is not put in lower case
@@ __init__
- text.lower() => text
@@ encode
- text.lower() => text
the text is put in lower case in one place but not in the other
@@ encode
- text.lower() => text
a new word is put in its sorted place, which changes the ids of other words
@@ encode
+ words = sorted({*self.ids, *text.lower().split()})
+ self.ids = {word: i for i, word in enumerate(words)}
+ self.words = dict(enumerate(words))
+ return [self.ids[word] for word in text.lower().split()]
words are looked up in a list, where id -1 is the last word
@@ decode
+ words = list(self.ids)
+ try:
+     return " ".join(words[i] for i in ids)
+ except IndexError as error:
+     raise KeyError(max(ids)) from error
the text is cut at single spaces only, not at all white space
@@ encode
- split() => split(" ")
a word gets a number each time it occurs: the table has each word once
- sorted(set(text.lower().split())) => sorted(text.lower().split())
ids begin at 1, but the first word has the id 0
- enumerate(words)} => enumerate(words, 1)}
- dict(enumerate(words)) => dict(enumerate(words, 1))
a word that the table lacks raises an error instead of getting the next id
@@ encode
+ return [self.ids[word] for word in text.lower().split()]
a word that the table lacks is left out instead of getting the next id
@@ encode
+ return [self.ids[word] for word in text.lower().split() if word in self.ids]
the next id is one above the largest, and an empty table has no largest: use the number of words
@@ encode
- i = self.ids.setdefault(word, len(self.ids))
+ i = self.ids[word] if word in self.ids else max(self.ids.values()) + 1
+ self.ids[word] = i
one id is skipped: the first free id is the number of words so far
@@ encode
- len(self.ids) => len(self.ids) + 1
new words are forgotten after the call: encode works on a copy of the table
@@ encode
- ids = [] => ids, known = [], dict(self.ids)
- self.ids.setdefault(word, len(self.ids)) => known.setdefault(word, len(known))
new words get ids in sorted order, where the first to occur gets the next one
@@ encode
+ for word in sorted(set(text.lower().split())):
+     self.words[self.ids.setdefault(word, len(self.ids))] = word
+ return [self.ids[word] for word in text.lower().split()]
an unknown id becomes <unk>, where a KeyError that names the id is asked for
- self.words[i] for => self.words.get(i, "<unk>") for
the words are in a list, whose error for an unknown id is an IndexError
@@ decode
+ words = list(self.ids)
+ return " ".join(words[i] for i in ids)
the words are joined without spaces
- " ".join => "".join
a space follows every word, also the last: join puts spaces between words only
- " ".join(self.words[i] for i in ids) => "".join(self.words[i] + " " for i in ids)
the first text is cut at single spaces only, not at all white space
@@ __init__
- split() => split(" ")
both texts are cut at single spaces only, not at all white space
@@ __init__
- split() => split(" ")
@@ encode
- split() => split(" ")
punctuation is cut off, where a word is everything between two white spaces
@@ __init__
- text.lower().split() => regex.findall("[a-zA-Z]+", text.lower())
@@ encode
- text.lower().split() => regex.findall("[a-zA-Z]+", text.lower())

# count_pairs
each distinct word counts once, however often the text has it
- += count => += 1
a pair counts only once per word, even if the word has it twice
- in pairwise(symbols) => in set(pairwise(symbols))
pairs reach from the end of one word to the start of the next
+ for left, right in pairwise(symbols for symbols in word_counts if symbols):
+     pairs[left[-1], right[0]] += 1
  return pairs
(a, b) and (b, a) are counted as one pair
- pairs[pair] => pairs[min(pair), max(pair)]
any two symbols of a word count, not only neighbours
- for pair in pairwise(symbols): => for pair in itertools.combinations(symbols, 2):
+ import itertools
  pairs: Counter[Pair] = Counter()
occurrences that overlap are skipped: positions are counted, not merges
- for pair in pairwise(symbols):
-     pairs[pair] += count
+ last = {}
+ for at, pair in enumerate(pairwise(symbols)):
+     if last.get(pair) != at - 1:
+         pairs[pair] += count
+         last[pair] = at
the count of a later word replaces those of the words before it
- += count => = count
the joined bytes are the key, where the pair itself is asked for
- pairs[pair] => pairs[b"".join(pair)]
the last pair of each word is missing
- pairwise(symbols) => pairwise(symbols[:-1])
symbols of several bytes are cut into bytes again before the pairs are counted
- pairwise(symbols) => pairwise([bytes([byte]) for byte in b"".join(symbols)])
the last symbol has no neighbour: a word has one pair less than it has symbols
- in pairwise(symbols): => in ((symbols[at], symbols[at + 1]) for at in range(len(symbols))):

# merge_pair
only the first occurrence is merged
- at += 2 => return (*merged, *symbols[at + 2 :])
merged from right to left
+ turned = reference.merge_pair([s[::-1] for s in reversed(symbols)], (pair[1][::-1], pair[0][::-1]))
+ return tuple(s[::-1] for s in reversed(turned))
the joined bytes of two neighbours are compared, so (ab, c) is taken for (a, bc)
- symbols[at] == left and at + 1 < len(symbols) and symbols[at + 1] == right
+ at + 1 < len(symbols) and symbols[at] + symbols[at + 1] == left + right
the word is joined with spaces and the pair replaced as text: xa b contains a b, too
+ if not symbols:
+     return ()
+ return tuple(b" ".join(symbols).replace(b" ".join(pair), b"".join(pair)).split(b" "))
merges overlap: a symbol is used by two of them
- at += 2 => at += 1 if tuple(symbols[at + 1 : at + 3]) == (left, right) else 2
the last symbol is lost when it is not merged
- at < len(symbols): => at < len(symbols) - 1:
the second symbol of a merged pair comes again: it is not skipped (in a for loop over a range, i += 1 skips nothing)
- at += 2 => at += 1
the result is a list, but words are tuples: a list cannot be the key of a dictionary
- return tuple(merged) => return merged
the last symbol has no neighbour: ask whether there is one before you look at it
- at + 1 < len(symbols) and symbols[at + 1] == right => symbols[at + 1] == right
the pair itself stands in the word, where its joined bytes belong
- left + right => pair
the last symbol is added even if a merge has used it
- at < len(symbols): => at < len(symbols) - 1:
- return tuple(merged) => return (*merged, *symbols[-1:])
symbols was changed in place: copy the list first
+ word, at = symbols if isinstance(symbols, list) else list(symbols), 0
+ while at < len(word) - 1:
+     if tuple(word[at : at + 2]) == pair:
+         word[at : at + 2] = [b"".join(pair)]
+     at += 1
+ return tuple(word)
a word without the pair comes back as it was given, also a list: the result is a tuple
- return tuple(merged) => return tuple(merged) if len(merged) < len(symbols) else symbols
the loop looks at the neighbour of every symbol, and the last one has none
+ merged = []
+ for at in range(len(symbols)):
+     if (symbols[at], symbols[at + 1]) == pair:
+         merged.append(symbols[at] + symbols[at + 1])
+     else:
+         merged.append(symbols[at])
+ return tuple(merged)
each symbol is compared together with its neighbour, and the last one has none
- symbols[at] == left and at + 1 < len(symbols) and symbols[at + 1] == right => (symbols[at], symbols[at + 1]) == pair
the loop looks at the neighbour of each symbol that begins the pair, and the last one has none
+ merged = []
+ for at in range(len(symbols)):
+     if symbols[at] == pair[0] and symbols[at + 1] == pair[1]:
+         merged.append(symbols[at] + symbols[at + 1])
+     else:
+         merged.append(symbols[at])
+ return tuple(merged)

# train_bpe
ties go to the pair that was seen first
- pair := index.most_frequent()
+ pair := max(pairs := count_pairs(dict(zip(index.words, index.word_counts))), key=pairs.get, default=None)
ties go to the smaller pair
- pair := index.most_frequent() => pairs := count_pairs(dict(zip(index.words, index.word_counts)))
+ pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
  merges.append(pair)
ties compare the joined bytes, where the pair's first symbols should be compared first
- pair := index.most_frequent() => pairs := count_pairs(dict(zip(index.words, index.word_counts)))
+ pair = max(pairs, key=lambda pair: (pairs[pair], pair[0] + pair[1]))
  merges.append(pair)
each distinct word counts once, however often the text has it
- : count for word => : 1 for word
special tokens are treated as text, and merged
- _special_pattern(special_tokens).split(text)[::2] => [text]
special tokens are deleted, so that pairs go across them
- _special_pattern(special_tokens).split(text)[::2] => ["".join(_special_pattern(special_tokens).split(text)[::2])]
the shortest special token is tried first, so a longer one that begins with it is never found
- reverse=True => reverse=False
the special tokens are tried as they were given, not the longest first
- sorted(special_tokens, key=len, reverse=True) => special_tokens
special tokens are put into a pattern without escaping, and there | means or
- map(regex.escape, longest_first) => longest_first
words are cut at white space, and the space before a word is lost
- PRE_TOKEN.findall => str.split
the text is not cut into words, so tokens span several words
- map(PRE_TOKEN.findall, pieces) => ([piece] for piece in pieces)
the special tokens take the first ids, before the bytes
- tokens = [bytes([byte]) for byte in range(256)]
+ tokens = [token.encode() for token in special_tokens]
+ tokens += [bytes([byte]) for byte in range(256)]
- tokens += [token.encode() for token in special_tokens] =>
the special tokens do not count towards vocab_size
- vocab_size - 256 - len(special_tokens) => vocab_size - 256
a vocab_size that is too small gives a larger vocabulary instead of an error
- n_merges < 0 => False
the counts are not updated after a merge, although the pairs on both sides of the merged one change
- index.merge(pair) => index.counts.pop(pair)
all pairs of all words are counted again after each merge
- index.merge(pair)
+ index = _PairIndex({merge_pair(word, pair): n for word, n in zip(index.words, index.word_counts)})
the pairs on both sides of a merge keep the counts that they had before it
- for old in pairwise(before):
-     self.counts[old] -= count
- for new in pairwise(after):
-     self.counts[new] += count
+ self.counts[pair] = 0
+ for new in pairwise(after):
+     self.counts[new] += count if pair[0] + pair[1] in new else 0
a pair whose count has fallen to 0 is merged: training should stop when no pair is left
- pair := index.most_frequent() => pair := max(index.counts, key=lambda pair: (index.counts[pair], pair), default=None)
- self.words_with.pop(pair) => self.words_with.pop(pair, ())
ties go to the first pair in the table of counts, in whatever order the updates have put it
- index = _PairIndex(
+ class Index(Tables):
+     def most_frequent(self):
+         return max(self.counts, key=self.counts.get, default=None)
+ index = Index(
the first counts take each distinct word once; only the updates use how often the text has it
- index = _PairIndex(
+ class Index(Tables):
+     def first_counts(self, words):
+         return Counter(pair for symbols in words for pair in pairwise(symbols))
+ index = Index(
an update subtracts and adds 1 for each word, not the number of times that the text has the word
- index = _PairIndex(
+ class Index(Tables):
+     def times(self, n):
+         return 1
+ index = Index(
an update counts a pair once per word, even if the word has it twice
- index = _PairIndex(
+ class Index(Tables):
+     def pairs_of(self, symbols):
+         return list(dict.fromkeys(pairwise(symbols)))
+ index = Index(
the words that contain a pair are noted only at the start: a pair that a merge creates has none, so its own merge
changes nothing
- index = _PairIndex(
+ class Index(Tables):
+     def add_holder(self, pair, n):
+         pass
+ index = Index(
the first word that gets a new pair is noted, the others are not
- index = _PairIndex(
+ class Index(Tables):
+     def add_holder(self, pair, n):
+         self.holders.setdefault(pair, {n})
+ index = Index(
a new pair is given all words of the merged pair, also those that do not contain it, and its own merge visits them all
- index = _PairIndex(
+ class Index(Tables):
+     def merge(self, best):
+         self.held = self.holders.get(best, set())
+         super().merge(best)
+     def add_holder(self, pair, n):
+         self.holders[pair] = self.holders.get(pair, set()) | self.held
+ index = Index(
a merge replaces the set of words that contain a pair instead of adding to it: words from an earlier merge are lost
- index = _PairIndex(
+ class Index(Tables):
+     def merge(self, best):
+         held, self.holders = self.holders, {best: self.holders.get(best, set())}
+         super().merge(best)
+         self.holders = held | self.holders
+ index = Index(
words are noted in the form that they had before a merge, and the old forms are counted again later
- _PairIndex( => OldForms(
bytes yield numbers when they are iterated over: a symbol is a bytes object, bytes([number])
- tuple(_bytes_of(word)) => tuple(word.encode())
words are cut into characters, where the first symbols are single bytes
- tuple(_bytes_of(word)) => tuple(letter.encode() for letter in word)
chr(b).encode() is UTF-8, which takes two bytes from 128 on: bytes([b]) is a single one
- bytes([byte]) for byte in range(256) => chr(byte).encode() for byte in range(256)
the text is put in lower case
- .split(text) => .split(text.lower())
the special tokens come before the merges: they are the last ones
- tokens += [left + right for left, right in merges]
- tokens += [token.encode() for token in special_tokens]
+ tokens += [token.encode() for token in special_tokens]
+ tokens += [left + right for left, right in merges]
the special tokens are strings in the vocabulary, where bytes are asked for
- [token.encode() for token in special_tokens] => list(special_tokens)
the vocabulary goes from bytes to ids, where it should go from ids to bytes
- dict(enumerate(tokens)) => {token: i for i, token in enumerate(tokens)}
the merges are lists, where each should be a tuple of two
- merges.append(pair) => merges.append(list(pair))
vocabulary and merges are returned in the other order
- dict(enumerate(tokens)), merges => merges, dict(enumerate(tokens))
one merge too many: there is room for vocab_size minus 256 minus the special tokens
- len(merges) < n_merges => len(merges) <= n_merges
one merge too few: there is room for vocab_size minus 256 minus the special tokens
- vocab_size - 256 - len(special_tokens) => vocab_size - 257 - len(special_tokens)
- n_merges < 0 => n_merges < -1
a vocab_size with no room for a merge is refused, although the bytes and the special tokens fit
- n_merges < 0 => n_merges <= 0
a pair that occurs only once is not merged: training stops only when no pair is left
- (pair := index.most_frequent()) => (pair := index.most_frequent()) and index.counts[pair] > 1
max of an empty table raises an error: stop when no pair is left
- index = _PairIndex(
+ class Index(Tables):
+     def most_frequent(self):
+         return max(self.counts, key=lambda pair: (self.counts[pair], pair))
+ index = Index(
a special token is replaced by a space, which then belongs to the word after it
- _special_pattern(special_tokens).split(text)[::2] => [" ".join(_special_pattern(special_tokens).split(text)[::2])]
a special token is replaced by a line break, which joins the white space around it into one word
- _special_pattern(special_tokens).split(text)[::2] => [chr(10).join(_special_pattern(special_tokens).split(text)[::2])]
the white space beside a special token is stripped, but it is a part of the text
- map(PRE_TOKEN.findall, pieces) => (PRE_TOKEN.findall(piece.strip()) for piece in pieces)
an entry of the heap whose count has fallen is thrown away: the pair should go back with its new count
@@ _PairIndex.most_frequent
- if self.counts[pair]:
-     heapq.heappush(self.heap, _LargestFirst((self.counts[pair], pair)))
+
the word itself is not replaced by its merged form
- index = _PairIndex(
+ class Index(Tables):
+     def merge(self, best):
+         before = list(self.words)
+         super().merge(best)
+         self.words = before
+ index = Index(
the pairs beside each merged symbol are counted one by one, which goes wrong where two merged symbols are neighbours
- _PairIndex( => Neighbours(

# BPETokenizer
the longest token that fits is taken from the left; the order of the merges is ignored
- while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
-     symbols = merge_pair(symbols, self.merges[min(known)])
+ rest, symbols = word.encode(), []
+ while rest:
+     size = next(n for n in range(len(rest), 0, -1) if rest[:n] in self.ids)
+     symbols.append(rest[:size])
+     rest = rest[size:]
the leftmost pair that is a merge is joined, whatever its rank
- symbols = merge_pair(symbols, self.merges[min(known)])
+ at, pair = next((at, pair) for at, pair in enumerate(pairwise(symbols)) if pair in self.ranks)
+ symbols = (*symbols[:at], pair[0] + pair[1], *symbols[at + 2 :])
pairs are joined in the order of their ids, not of the merges
- while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
-     symbols = merge_pair(symbols, self.merges[min(known)])
+ for pair in sorted(self.merges, key=lambda pair: self.ids[pair[0] + pair[1]]):
+     symbols = merge_pair(symbols, pair)
the list of merges is gone through only once: a pair that a later merge creates is never joined
- while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
-     symbols = merge_pair(symbols, self.merges[min(known)])
+ for pair in self.merges:
+     symbols = merge_pair(symbols, pair)
every word goes through the whole list of merges, again and again until none applies
- while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
-     symbols = merge_pair(symbols, self.merges[min(known)])
+ before = None
+ while symbols != before:
+     before = symbols
+     for pair in self.merges:
+         symbols = merge_pair(symbols, pair)
the next id is taken from the length of the vocabulary, not from its largest id
- max(self.vocab, default=-1) + 1 => len(self.vocab)
pairs are merged across words: the text is not cut by PRE_TOKEN first
- PRE_TOKEN.findall(piece) => [piece] if piece else []
each token is decoded alone, which breaks characters of several tokens
- b"".join(self.vocab[i] for i in ids).decode(errors="replace")
+ "".join(self.vocab[i].decode(errors="replace") for i in ids)
invalid bytes vanish instead of becoming U+FFFD
- errors="replace" => errors="ignore"
an unknown id is silently left out of the text
- self.vocab[i] for i => self.vocab.get(i, b"") for i
ids of bytes are taken to be the bytes' values; the vocabulary says what they are
+ self.ids |= {bytes([b]): b for b in range(256)}
  self._special =
the special tokens are tried as they were given, not the longest first
- sorted(special_tokens, key=len, reverse=True) => special_tokens
special tokens are put into the pattern without escaping, and there [SEP] means one of three letters
- map(regex.escape, longest_first) => longest_first
- n % 2 => piece in self.special_tokens
without special tokens the pattern is empty, and an empty pattern cuts between all characters
- ("|".join(map(regex.escape, longest_first)) or "(?!)") => "|".join(map(regex.escape, longest_first))
- n % 2 => piece in self.special_tokens
special tokens are encoded like any other text
@@ encode
+ return list(chain.from_iterable(map(self._word_ids.__getitem__, PRE_TOKEN.findall(text))))
special tokens are appended to the vocabulary that was passed in, which changes the caller's
- dict(vocab) => vocab
each chunk of a stream is encoded alone, so words are cut where the chunks are
@@ encode_iterable
+ for chunk in chunks:
+     yield from self.encode(chunk)
what is left in the buffer after the last chunk is never given
- yield from self.encode(buffer) =>
ids wait for a thousand more characters of the stream, although they are certain
- buffer, enough = "", 0 => buffer, enough = "", 1000
- enough = 2 * len(buffer) => enough = 1000 + 2 * len(buffer)
the whole stream is read and joined before the first id comes out
@@ encode_iterable
+ yield from self.encode("".join(chunks))
only the last word is held back: a contraction or a run of spaces may join the one before it
- islice(later, 2, None) => islice(later, 1, None)
a special token that is split over two chunks is missed: the end of a chunk is encoded too early
- max(map(len, self.special_tokens), default=0) => 0
the certain words are joined and encoded as a text of their own: without what follows, they are cut differently
- for token, end, is_special in _settled(buffer, self._special, longest):
-     yield from [self.ids[token.encode()]] if is_special else word_ids[token]
+ end = max((end for _, end, _ in _settled(buffer, self._special, longest)), default=0)
+ yield from self.encode(buffer[:end])
the whole buffer is scanned again for every chunk: a long word costs the square of its length
- len(buffer) < enough => False
every word is remembered, even in a stream: the table of words grows with the text
- max_words=2048 => max_words=10**9
every word is merged again each time it occurs
- self[word] = ids => ids
the pair that comes last in merges is joined first
- min(known) => max(known)
only one pair of a word is joined: repeat it until no pair of the word is a merge
- while known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
+ if known := [self.ranks[pair] for pair in pairwise(symbols) if pair in self.ranks]:
invalid bytes raise an error instead of becoming U+FFFD
- errors="replace" => errors="strict"
the text is put in lower case
@@ encode
- split(text) => split(text.lower())
the text is normalized first, which makes one character of a letter and its accent
@@ encode
- split(text) => split(unicodedata.normalize("NFC", text))
+ import unicodedata
  ids: list[int] = []
half of a surrogate pair is left out or replaced, where UnicodeEncodeError is asked for
@@ _bytes_of
- word.encode() => word.encode(errors="ignore")
a special token that the vocabulary has already gets a new id
- if token.encode() not in self.ids: => if True:
the special tokens get their ids in the order of their lengths, not as they were given
- list(special_tokens or ()) => sorted(special_tokens, key=len, reverse=True)
the list of special tokens was sorted in place, which changes the caller's
+ if isinstance(special_tokens, list):
+     special_tokens.sort(key=len, reverse=True)
  self._special = _special_pattern(self.special_tokens)
special_tokens.sort() changes the caller's list, and with it the order of the new ids
- self.special_tokens = list(special_tokens or ())
+ if isinstance(special_tokens, list):
+     special_tokens.sort(key=len, reverse=True)
+ self.special_tokens = list(special_tokens)
the whole stream is read as soon as encode_iterable is called, before an id is asked for
@@ encode_iterable
+ return iter(self.encode("".join(chunks)))
each line of a stream is encoded alone, but a run of line breaks is one word
@@ encode_iterable
+ buffer = ""
+ for chunk in chunks:
+     *lines, buffer = (buffer + chunk).split(chr(10))
+     yield from chain.from_iterable(self.encode(line + chr(10)) for line in lines)
+ yield from self.encode(buffer)
the stream is cut at its last space, but a run of spaces is one word up to the last of them
@@ encode_iterable
+ buffer = ""
+ for chunk in chunks:
+     buffer += chunk
+     at = max(0, buffer.rfind(" "))
+     yield from self.encode(buffer[:at])
+     buffer = buffer[at:]
+ yield from self.encode(buffer)
the shortest special token is tried first, so a longer one that begins with it is never found
- reverse=True => reverse=False

# embed
the rows are looked up: the values are right, but there is no matrix product
+ return weight[ids.long()]
weight[ids] takes ids of uint8 for a mask, and looks up rows, where a matrix product is asked for
+ return weight[ids]
num_classes is the largest id plus one, where it is the number of rows of the table
- ids.long(), num_classes=len(weight) => ids, num_classes=int(ids.max()) + 1
the table is detached: the values are right, but no gradient reaches it
- @ weight => @ weight.detach()
the one-hot rows are as wide as the largest id, not as the vocabulary
- ids.long(), num_classes=len(weight) => ids
the columns of the table are taken for tokens: the product sums over the wrong axis
+ one_hot = torch.nn.functional.one_hot(ids, num_classes=weight.shape[1]).to(weight.dtype)
+ return one_hot @ weight.T
one_hot takes int64 only, and ids may have any integer dtype: make them int64 first
- ids.long() => ids
the result is float32 whatever the table's dtype
- one_hot.to(weight.dtype) @ weight => one_hot.float() @ weight.float()
a token that occurs twice is used once: the one-hot rows are made of the distinct ids
+ one_hot = torch.zeros(*ids.shape, len(weight), dtype=weight.dtype)
+ seen = set()
+ for at, i in enumerate(ids.flatten().tolist()):
+     if i not in seen:
+         one_hot.view(-1, len(weight))[at, i] = 1
+         seen.add(i)
+ return one_hot @ weight
functional.embedding was called: it looks up the rows, and there is no matrix product
+ return torch.nn.functional.embedding(ids, weight)
the one-hot rows are float32 whatever the table's dtype, and a product takes two tensors of the same dtype
- one_hot.to(weight.dtype) => one_hot.float()
the one-hot rows are integers, and a product takes two tensors of the same dtype
- ids.long(), num_classes => ids, num_classes
- one_hot.to(weight.dtype) => one_hot
the one-hot rows are float32, where the table's dtype is needed, and ids are not made int64 first
- ids.long(), num_classes => ids, num_classes
- one_hot.to(weight.dtype) => one_hot.float()
the one-hot rows are integers, as wide as the largest id: they need the table's dtype and its number of rows
- ids.long(), num_classes=len(weight) => ids
- one_hot.to(weight.dtype) => one_hot
the one-hot rows are float32, as wide as the largest id: they need the table's dtype and its number of rows
- ids.long(), num_classes=len(weight) => ids
- one_hot.to(weight.dtype) => one_hot.float()
""")


class Tables:
    """Hint 3's four tables and its loop, in steps, each of which a mistake may take in its own way."""

    def __init__(self, words):
        self.words, self.word_counts = list(words), list(words.values())
        self.counts = self.first_counts(words)
        self.holders: dict[Any, Any] = {}
        for n, symbols in enumerate(self.words):
            for pair in pairwise(symbols):
                self.holders.setdefault(pair, set()).add(n)

    def first_counts(self, words):
        return reference.count_pairs(words)

    def most_frequent(self):
        return max(self.counts, key=lambda pair: (self.counts[pair], pair), default=None)

    def pairs_of(self, symbols):
        return list(pairwise(symbols))

    def times(self, n):
        return self.word_counts[n]

    def add_holder(self, pair, n):
        self.holders.setdefault(pair, set()).add(n)

    def merge(self, best):
        for n in sorted(self.holders.get(best, ())):
            before, self.words[n] = self.words[n], reference.merge_pair(self.words[n], best)
            for pair in self.pairs_of(before):
                self.counts[pair] -= self.times(n)
            for pair in self.pairs_of(self.words[n]):
                self.counts[pair] += self.times(n)
                self.add_holder(pair, n)
        self.counts = Counter({pair: count for pair, count in self.counts.items() if count > 0 and pair != best})


class Neighbours(Tables):
    """The same, where only the pairs beside each merged symbol are counted again."""

    def merge(self, best):
        joined = b"".join(best)
        for n in sorted(self.holders.get(best, ())):
            self.words[n] = word = reference.merge_pair(self.words[n], best)
            for at in (at for at, symbol in enumerate(word) if symbol == joined):
                if at > 0:
                    self.move((word[at - 1], best[0]), (word[at - 1], joined), n)
                if at + 1 < len(word):
                    self.move((best[1], word[at + 1]), (joined, word[at + 1]), n)
        self.counts = Counter({pair: count for pair, count in self.counts.items() if count > 0 and pair != best})

    def move(self, before, after, n):
        self.counts[before] -= self.times(n)
        self.counts[after] += self.times(n)
        self.add_holder(after, n)


class OldForms:
    """The same, where the words that contain a pair are noted in the form that they had at the time."""

    def __init__(self, words):
        self.words, self.counts = dict(words), reference.count_pairs(words)
        self.holders: dict[Any, Any] = {}
        for symbols in self.words:
            for pair in pairwise(symbols):
                self.holders.setdefault(pair, []).append(symbols)

    def most_frequent(self):
        return max(self.counts, key=lambda pair: (self.counts[pair], pair), default=None)

    def merge(self, best):
        for before in self.holders.pop(best, ()):
            after = reference.merge_pair(before, best)
            self.words[after] = count = self.words[before]
            for pair in pairwise(before):
                self.counts[pair] -= count
            for pair in pairwise(after):
                self.counts[pair] += count
                self.holders.setdefault(pair, []).append(after)
        self.counts = Counter({pair: count for pair, count in self.counts.items() if count > 0 and pair != best})
