"""What goes wrong when people make corpora by hand."""

from lib.workbook.grading import edits

edits(r"""
# extract_text
bytes that are not UTF-8 are read as Latin-1, which has control characters where Windows-1252 has "€"
- pages.decode(html)
+ pages.decode(html) if isinstance(html, str) or not pages.decode(html).count("€") else html.decode("latin-1")
every end tag ends the innermost element that is left out, whatever its name
@@ _Page.handle_endtag
- pages.end_element(self.left_out, tag) => self.left_out.pop()
an end tag ends all that is left out, so the rest of an outer element comes back
@@ _Page.handle_endtag
- pages.end_element(self.left_out, tag) => self.left_out = [] if tag in self.left_out else self.left_out
an end tag only ends the element that was opened last, so one without an end tag swallows the rest
@@ _Page.handle_endtag
- pages.end_element(self.left_out, tag) => self.left_out = self.left_out[: -1 if tag == self.left_out[-1] else None]
an end tag ends only its own element, and what was opened in it stays open
@@ _Page.handle_endtag
- pages.end_element(self.left_out, tag) => self.left_out = [name for name in self.left_out if name != tag]
a head without an end tag lasts to the end of the page: a body should end it
@@ _Page.handle_starttag
- if tag == "body": => if tag == "no tag":
the last line is lost: no tag ends it
- page.lines.end_line() =>
what the parser still waits for is lost: it must be closed
- page.close() =>
an inner list gets the boundary of a block: only a list that is in no other list has one
@@ _Page.handle_starttag
- bool(self.lists) => False
every item has the indent of the first list
@@ _Page.handle_starttag
- self.lines.items[len(self.lists)] = True => self.lines.items[min(1, len(self.lists))] = True
an item that has ended without text still waits, and gives its bullet to text outside of it
@@ _Page.handle_endtag
- self.lines.items.pop(len(self.lists), None) => self.lines.items.get(len(self.lists), None)
two cells of a row run into one word
@@ _Page.handle_starttag
- self.lines.add(" ") => self.lines.add("")
spaces inside of "pre" are taken for those of other text
@@ _Page.handle_starttag
- self.lines.n_pre += tag == "pre" => self.lines.n_pre += 0
cells of a heading run into one word: "th" is a cell, too
@@ _Page.handle_starttag
- ("td", "th") => ("td",)
a tag inside of what is left out still ends a line
@@ _Page.handle_starttag
- if self.left_out: => if self.left_out and not self.lines.break_at(tag, False):
a line whose share of links equals the limit is dropped: only a larger share is too much
- pages.Lines(max_link_density) => pages.Lines(max_link_density - 1e-9)
a link never ends, so all later lines count as links
@@ _Page.handle_endtag
- self.lines.in_link &= tag != "a" => self.lines.in_link &= True
a line is never dropped for its links
@@ _Page.handle_starttag
- self.lines.in_link |= tag == "a" => self.lines.in_link |= False
an end tag ends the innermost list, whatever its name
@@ _Page.handle_endtag
- pages.end_element(self.lists, tag) => self.lists and self.lists.pop()
a "</pre>" that nothing opened makes the number of open ones negative, and spaces stay
@@ _Page.handle_endtag
- self.lines.n_pre -= tag == "pre" and self.lines.n_pre > 0 => self.lines.n_pre -= tag == "pre"

# gopher_quality
symbols count as words: a word has a letter or digit
- [token for token in tokens if any(map(str.isalnum, token))] => [token for token in tokens]
a value that equals its limit passes: fewer than the minimum is too short, not as many
- len(words) < min_doc_words => len(words) <= min_doc_words
a value that equals its limit passes: more than the maximum is too long, not as many
- len(words) > max_doc_words => len(words) >= max_doc_words
the mean length is over all tokens, symbols too
- sum(map(len, words)) / len(words) => sum(map(len, tokens)) / len(tokens)
tokens with a symbol are counted, not symbols: one token may have two
- text.count("#") / len(tokens) => share("#" in token for token in tokens)
"#" are counted per word: the share is per token, so a lone "#" is in the divisor
- text.count("#") / len(tokens) => text.count("#") / len(words)
only three dots count as an ellipsis, not the character
- ellipses = ("...", "…") => ellipses = ("...",)
blank lines count as lines
- [line for line in map(str.strip, text.splitlines()) if line]
+ [line or "x" for line in map(str.strip, text.splitlines())]
lines are not stripped, so an indented bullet is none
- [line for line in map(str.strip, text.splitlines()) if line] => [line for line in text.splitlines() if line.strip()]
the share of tokens with a letter is taken over words, without the symbols
- share(any(map(str.isalpha, t)) for t in tokens) => share(any(map(str.isalpha, t)) for t in words)
only the letters from A to Z are letters
- share(any(map(str.isalpha, t)) for t in tokens) => share(bool(re.search("[A-Za-z]", t)) for t in tokens)
stop words are looked up in the tokens, which may have capitals or punctuation
- set(normalize(text)) => set(tokens)
every occurrence of a stop word counts: they must be different words
- len(pages.STOP_WORDS & set(normalize(text))) => sum(word in pages.STOP_WORDS for word in normalize(text))
ellipses are judged before hashes
- next((name for name, broken in rules.items() if broken), None)
+ next((name for name in sorted(rules, key=lambda name: "hashes" in name) if rules[name]), None)
a value that equals its limit passes: more than the ratio is too much, not as much
- text.count("#") / len(tokens) > => text.count("#") / len(tokens) >=
- sum(map(text.count, ellipses)) / len(tokens) > => sum(map(text.count, ellipses)) / len(tokens) >=
- > max_bullet_lines_ratio => >= max_bullet_lines_ratio
- > max_ellipsis_lines_ratio => >= max_ellipsis_lines_ratio
a limit is written as a number, so another one changes nothing
- < min_avg_word_length => < 3
- > max_avg_word_length => > 10
- text.count("#") / len(tokens) > max_symbol_word_ratio => text.count("#") / len(tokens) > 0.1
- > max_bullet_lines_ratio => > 0.9
- > max_ellipsis_lines_ratio => > 0.3
- < min_stop_words => < 2
punctuation is taken off the words before their mean length: it counts
- sum(map(len, words)) / len(words) => sum(len(word.strip(".,;:!?()…")) for word in words) / len(words)
stop words are found inside of other words, too
- len(pages.STOP_WORDS & set(normalize(text))) => sum(word in text.lower() for word in pages.STOP_WORDS)
a bullet counts only with a space behind it
- line[0] in "•-*" for line in lines => line.startswith(("• ", "- ", "* ")) for line in lines

# c4_clean
"lorem ipsum" is looked for in this spelling only
- "lorem ipsum" in text.lower() => "lorem ipsum" in text
a line with a curly bracket is dropped: C4 drops the whole page
- if "{" in text:
+ text = "\n".join(line for line in text.splitlines() if "{" not in line)
+ if not text:
a line that ends with three dots is kept, although it ends with a dot
- and not line.endswith("...") =>
a closing quotation mark does not end a line
- (".", "?", "!", '"') => (".", "?", "!")
phrases are looked for with capitals as they are
- phrase in line.lower() => phrase in line
a line that is banned drops the page
- if sum( => if any(phrase in text.lower() for phrase in pages.BANNED) or sum(
a word as long as the limit drops the line
- <= max_word_length => < max_word_length
every dot ends a sentence, also inside of a number
- _SENTENCE_END.findall(line) => re.findall("[.?!]+", line)
lines are counted as sentences
- max(1, len(_SENTENCE_END.findall(line))) => 1
a line without the end of a sentence counts none: at least 1
- max(1, len(_SENTENCE_END.findall(line))) => len(_SENTENCE_END.findall(line))
the sentences of all lines are counted, not only of those that stay
- for line in lines) < min_num_sentences => for line in filter(str.strip, text.splitlines())) < min_num_sentences
lines keep the spaces around them
- for line in map(str.strip, text.splitlines()) => for line in text.splitlines()
"lorem ipsum" drops its line: C4 drops the whole page
- return "", "lorem_ipsum" => text = "\n".join(line for line in text.splitlines() if "lorem ipsum" not in line.lower())
a value that equals its limit passes: fewer sentences than the minimum are too few, not as many
- < min_num_sentences => <= min_num_sentences
a value that equals its limit passes: a line with fewer tokens than the minimum is dropped, not one with as many
- >= min_words_per_line => > min_words_per_line
the length of the line is compared, not that of its tokens
- max(map(len, line.split())) <= max_word_length => len(line) <= max_word_length
every line that speaks of cookies is dropped: only the listed phrases are banned
- for phrase in pages.BANNED) => for phrase in (*pages.BANNED, "cookie"))
only an end before white space is counted: the end of the line ends a sentence, too
- len(_SENTENCE_END.findall(line)) => len(re.findall(r'''[.?!]+["')\]]*\s''', line))
what closes a quotation or a bracket may not stand between the dot and the space
- len(_SENTENCE_END.findall(line)) => len(re.findall(r"[.?!]+(?=\s|$)", line))
a line that ends with dots inside a quotation is dropped: it ends with the quotation mark
- and not line.endswith("...") => and not line.rstrip('"').endswith("...")

# mask_pii
phone numbers are masked before addresses, and break those that begin with one
- for kind, mask in pages.MASKS.items(): => for kind, mask in reversed(pages.MASKS.items()):
one pass: what a mask has freed is only masked by the next call
- while text != before: => while before is None:
the last pass is counted, not the sum of all
- counts[kind] += n => counts[kind] = max(n, counts[kind])
a version number is an address: nothing is asked of what stands before and after
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind] if kind != "ip" else rf"{_BYTE}(?:\.{_BYTE}){{3}}", mask, text)
numbers above 255 are taken for parts of an address
- re.subn(_PERSONAL[kind], mask, text) => re.subn(_PERSONAL[kind].replace(_BYTE, "[0-9]{1,3}"), mask, text)
letters of all alphabets count as letters
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind].replace("A-Za-z0-9", r"\w").replace("[0-9]", r"\d"), mask, text)
an address at the end of a sentence is none: only a dot with a digit after it forbids it
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind].replace(r"(?![A-Za-z0-9]|\.[0-9])", "(?![A-Za-z0-9.])"), mask, text)
the country's code stays in the text
- re.subn(_PERSONAL[kind], mask, text) => re.subn(_PERSONAL[kind].replace(r"(?:\+?1[ .-]?)?", ""), mask, text)
a domain of one label is taken for an address
- re.subn(_PERSONAL[kind], mask, text) => re.subn(_PERSONAL[kind].replace(r"\.)+", r"\.)*"), mask, text)
the labels of a domain have letters alone: digits count, too
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind].replace(_LABEL, "[A-Za-z](?:[A-Za-z-]*[A-Za-z])?"), mask, text)
the last label has at most some letters: it has two or more
- re.subn(_PERSONAL[kind], mask, text) => re.subn(_PERSONAL[kind].replace("{2,}", "{2,6}"), mask, text)
addresses with capitals are not found
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind].replace("A-Z", "" if kind == "email" else "A-Z"), mask, text)
the masks in the text are counted, also those that stood there before the call
- return text, counts => return text, {kind: text.count(mask) for kind, mask in pages.MASKS.items()}
any white space may stand between the parts of a phone number: only a space may
- re.subn(_PERSONAL[kind], mask, text) => re.subn(_PERSONAL[kind].replace("[ .-]?", r"[\s.-]?"), mask, text)
a word boundary stands for "no letter or digit before": it forbids an underscore and letters of all alphabets
- re.subn(_PERSONAL[kind], mask, text)
+ re.subn(_PERSONAL[kind].replace("(?<![A-Za-z0-9.", r"\b(?<![."), mask, text)

# normalize
accents stay on their letters: the composed form keeps them
- unicodedata.normalize("NFKD", text) => unicodedata.normalize("NFKC", text)
ligatures and fractions stay: that needs the form with K
- unicodedata.normalize("NFKD", text) => unicodedata.normalize("NFD", text)
combining marks become spaces and cut words in two
- if not unicodedata.category(c).startswith("M") =>
NFKD comes before lower case, so letters that it takes out of symbols become small
- text = text.lower() => text = unicodedata.normalize("NFKD", text).lower()
capitals stay
- text = text.lower() =>
the underscore counts as a letter
- r"[^\W_]+" => r"\w+"
only characters with a combining class are removed, so vowel signs without one become spaces
- not unicodedata.category(c).startswith("M") => not unicodedata.combining(c)
letters of other alphabets are dropped
- r"[^\W_]+" => "[a-z0-9]+"

# deduplicate_lines
lines are compared with the spaces around them
- counts = Counter(text_hash(line.strip()) => counts = Counter(text_hash(line)
- mark = text_hash(line.strip()) => mark = text_hash(line)
blank lines are duplicates of each other, too
- not line.strip() or counts[mark] == 1 => counts[mark] == 1
a line is counted once a document, so one that occurs twice in a single document stays
- for line in text.splitlines()) => for line in dict.fromkeys(map(str.strip, text.splitlines())))
each document is looked at alone
+ here = [text for text in documents if line in text]
+ return not line.strip() or counts[mark] == 1 or len(here) == 1
  return not line.strip() or counts[mark] == 1
"none" keeps the first occurrence
- (keep == "first" and first) => first
"first" drops every occurrence
- or (keep == "first" and first) =>
lines lose their ends
- text.splitlines(keepends=True) => text.splitlines()
documents without lines are dropped
- return ["".join(filter(stays, text.splitlines(keepends=True))) for text in documents]
+ return [t for t in ("".join(filter(stays, text.splitlines(keepends=True))) for text in documents) if t.strip()]
the lines themselves are kept, not their hashes
- counts = Counter(text_hash(line.strip()) for text in documents for line in text.splitlines())
+ counts = Counter(line.strip() for text in documents for line in text.splitlines())
- mark = text_hash(line.strip()) => mark = line.strip()
every keep that is not "first" is taken for "none"
- if keep not in ("none", "first"): => if keep == "":
only a newline ends a line: "splitlines" knows others, too
- counts = Counter(text_hash(line.strip()) for text in documents for line in text.splitlines())
+ counts = Counter(text_hash(line.strip()) for text in documents for line in text.split("\n"))
- ["".join(filter(stays, text.splitlines(keepends=True))) for text in documents]
+ ["".join(filter(stays, re.findall("[^\n]*\n|[^\n]+", text))) for text in documents]
a line of spaces alone is not taken for a blank one
- not line.strip() or counts[mark] == 1 => not line.strip("\r\n") or counts[mark] == 1
every line gets a newline at its end, also one that had none
- "".join(filter(stays, text.splitlines(keepends=True)))
+ "".join(line if line.endswith(("\n", "\u2028")) else line + "\n" for line in filter(stays, text.splitlines(True)))

# minhash_signature
words are taken as they stand in the text, not normalized
@@ _shingles
- normalize(text) => text.split()
a text with fewer words than a shingle has none
@@ _shingles
- word_grams(words, min(n, len(words))) => word_grams(words, n)
shingles do not overlap
@@ _shingles
- word_grams(words, min(n, len(words))) => word_grams(words, min(n, len(words)))[::n]
the hash has 8 bytes, so the products overflow
@@ minhash_signature
- text_hash(shingle, 4) => text_hash(shingle, 8)
b is drawn before a
@@ minhash_signature
- a = rng.integers(1, 2**32, n_hashes, dtype=np.uint64) => b = rng.integers(0, 2**32, n_hashes, dtype=np.uint64)
- b = rng.integers(0, 2**32, n_hashes, dtype=np.uint64) => a = rng.integers(1, 2**32, n_hashes, dtype=np.uint64)
the modulus is left out
@@ minhash_signature
- values -= values // prime * prime =>
the largest value is kept, not the least
@@ minhash_signature
- prime, least = np.uint64(PRIME), np.full(n_hashes, PRIME, np.uint64)
+ prime, least = np.uint64(PRIME), np.full(n_hashes, 0 if len(h) else PRIME, np.uint64)
- np.minimum(least, values.min(0), out=least) => np.maximum(least, values.max(0), out=least)
all values of a long text are held at once
@@ minhash_signature
- range(0, len(h), 256) => range(0, len(h), 10**9)
- h[start : start + 256] => h[start:]
the modulus is 2**32, whose factors make the functions alike
@@ minhash_signature
- prime, least = np.uint64(PRIME), np => prime, least = np.uint64(2**32), np

# near_duplicates
documents that meet in a band are linked without a comparison
@@ near_duplicates
- and similarity(i, j) >= threshold: => :
a similarity that equals the threshold does not link
@@ near_duplicates
- similarity(i, j) >= threshold => similarity(i, j) > threshold
pairs that are in one cluster already are compared again
@@ near_duplicates
- while len(set(map(clusters.find, bucket))) > 1: => while len(bucket) > 1:
- clusters.find(i) != clusters.find(j) and similarity => similarity
pairs that are in one cluster already are compared again, as long as their bucket holds a stranger, too
@@ near_duplicates
- clusters.find(i) != clusters.find(j) and similarity => similarity
a pair that meets in several bands is compared in each
@@ near_duplicates
- functools.cache(lambda i, j: parts.jaccard(shingles(i), shingles(j)))
+ lambda i, j: parts.jaccard(shingles(i), shingles(j))
only the first band is looked at
@@ _buckets
- signature.reshape(n_bands, -1) => signature.reshape(n_bands, -1)[:1]
documents without words are copies of each other
@@ near_duplicates
  clusters = parts.Clusters(len(documents))
+ empty = [i for i, text in enumerate(documents) if not normalize(text)]
+ for i in empty[1:]:
+     clusters.link(empty[0], i)
only neighbours in a bucket are compared
@@ near_duplicates
- for j in bucket: => for j in bucket[:1]:
the seed is not handed on to the signatures
@@ _buckets
- minhash_signature(text, n_hashes, ngrams, seed) => minhash_signature(text, n_hashes, ngrams)
a band has every n_bands-th value, not consecutive ones
@@ _buckets
- signature.reshape(n_bands, -1) => np.ascontiguousarray(signature.reshape(-1, n_bands).T)
the similarity is that of the sets of words, not of shingles
@@ near_duplicates
- _shingles(documents[i], ngrams) => set(normalize(documents[i]))

# contaminated_spans
spans of n-grams are not merged
- edges = np.flatnonzero(np.diff(covered)).tolist()
+ starts = [i for i, gram in enumerate(word_grams(words, n)) if text_hash(gram) in known]
- list(zip(edges[::2], edges[1::2], strict=True)) => [(i, i + n) for i in starts]
n-grams run from one evaluation text into the next
- for text in evaluation for gram in word_grams(normalize(text), n)
+ for gram in word_grams(normalize(" ".join(evaluation)), n)
only the first word of an n-gram is marked
- covered[i + 1 : i + n + 1] = 1 => covered[i + 1] = 1
the end of a span is its last word: it is the word after that
- list(zip(edges[::2], edges[1::2], strict=True))
+ [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]
an n-gram covers one word less than it has
- covered[i + 1 : i + n + 1] = 1 => covered[i + 1 : i + n] = 1
the evaluation is read again for each document
- known = {text_hash(gram) for text in evaluation for gram in word_grams(normalize(text), n)} => found = []
- found = [] =>
  words = normalize(text)
+ known = {text_hash(gram) for text in evaluation for gram in word_grams(normalize(text), n)}
the words of the evaluation are not normalized
- word_grams(normalize(text), n)} => word_grams(text.split(), n)}
the words of the documents are not normalized
- words = normalize(text) => words = text.split()
the n-grams themselves are kept, not their hashes
- known = {text_hash(gram) for => known = {gram for
- text_hash(gram) in known => gram in known

# QualityClassifier
features are counted once each, without repetitions
@@ features
- for gram in grams] => for gram in dict.fromkeys(grams)]
the words are not normalized
@@ features
- words = normalize(text) => words = text.split()
single words are left out
@@ features
- range(1, self.ngrams + 1) => range(self.ngrams, self.ngrams + 1)
a text's rows are summed, so long texts have large logits
@@ _logits
- mode="mean" => mode="sum"
the bias is left out of the logits
@@ _logits
- + self.bias => + 0 * self.bias
the weights decay
@@ fit
- weight_decay=0.0 => weight_decay=0.3
gradients of all steps add up
@@ fit
- optimizer.zero_grad() =>
the loss is computed after the last update
@@ fit
- return loss.item() => return cross_entropy(self._logits(features), targets).item()
the hash has 4 bytes
@@ features
- text_hash(gram) % self.n_features => text_hash(gram, 4) % self.n_features

# plan_mixture
sources are read more often than max_epochs allows
- if shares[name] > max_epochs * sizes[name] => if False
what a cap cuts off is lost
- return taken | shares
+ return taken | {name: budget * s / left for name, s in shares.items() if False} | {
+     name: budget * (weights[name] ** (1 / temperature))
+     / sum(w ** (1 / temperature) for w in weights.values() if w > 0) for name in open_}
caps are looked at once: what they cut off may lift others above theirs
  open_ = [name for name in open_ if name not in capped]
+ whole = sum(weights[name] ** (1 / temperature) for name in open_)
+ return taken | {name: left * weights[name] ** (1 / temperature) / whole for name in open_}
the power is the temperature, not its inverse
- ** (1 / temperature) => ** temperature
a source of weight 0 takes part at an infinite temperature
- if weights[name] > 0], float(budget) => if temperature == float("inf") or weights[name] > 0], float(budget)
the power of a large size overflows: divide by the largest first
- (weights[name] / largest) ** (1 / temperature) => float(weights[name]) ** (1 / temperature)
the order is that of the weights' sizes
- taken = dict.fromkeys(sizes, 0.0) => taken = dict.fromkeys(sorted(sizes), 0.0)
the order is that of the weights
- taken = dict.fromkeys(sizes, 0.0) => taken = dict.fromkeys(weights, 0.0)
the tokens are rounded: they are floats, which sum to the budget
- return taken | shares => return {name: float(round(n)) for name, n in (taken | shares).items()}
the budget is compared with four epochs, not with max_epochs
- temperature, max_epochs) => temperature, 4.0)

# pack_documents
each piece goes to the row with the most room: that leaves holes of all sizes
- place = bisect_left(rooms, (length, -1)) => place = len(rooms) - 1 if rooms and rooms[-1][0] >= length else len(rooms)
each piece goes to the first row that has room for it
- place = bisect_left(rooms, (length, -1))
+ fits = [(row, i) for i, (room, row) in enumerate(rooms) if room >= length]
+ place = min(fits)[1] if fits else len(rooms)
pieces are placed in the order of the documents
- sorted(pieces, key=lambda piece: -piece[2]) => pieces
the shortest pieces go first
- key=lambda piece: -piece[2] => key=lambda piece: piece[2]
of equal pieces the later document goes first
- sorted(pieces, key=lambda piece: -piece[2]) => sorted(pieces, key=lambda piece: piece[2])[::-1]
long documents are cut off at the end of a row
- for j in range(0, n, row_length) => for j in range(0, min(n, 1), row_length)
a row that is exactly as long as the piece is not used
- bisect_left(rooms, (length, -1)) => bisect_left(rooms, (length + 1, -1))

# write_shards
no end follows an empty document
- for piece in chain(pieces, [[end_id]]): => for piece in chain(pieces, [[end_id]] if len(document) else []):
no end follows a document
- for piece in chain(pieces, [[end_id]]): => for piece in pieces:
a vocabulary of exactly 65,536 gets four bytes: its largest id is 65,535
- vocab_size <= 2**16 => vocab_size < 2**16
ids are written in big-endian order
- f"<u{width}" => f">u{width}"
the id at the end of a document is not checked
- shards.checked_ids(piece, vocab_size).astype
+ (np.array(piece) if piece == [end_id] else shards.checked_ids(piece, vocab_size)).astype
an old manifest stays while the shards are written
- (folder / "manifest.json").unlink(missing_ok=True) =>
the manifest is written under its own name, so a reader may see half of it
- return shards.save_manifest(folder, manifest)
+ import json
+ (folder / "manifest.json").write_text(json.dumps(manifest))
+ return manifest
the whole row is kept in memory
- if len(waiting) >= shard_tokens * width: => if False:
- if waiting: => while waiting:
- files.append(shards.save_shard(folder, len(files), waiting, width))
+ files.append(shards.save_shard(folder, len(files), waiting[: shard_tokens * width], width))
+ del waiting[: shard_tokens * width]
a long document is converted as a whole
- (document[i : i + shard_tokens] for i in range(0, len(document), shard_tokens))
+ (part for part in np.array_split(np.array(document, np.int64), range(shard_tokens, len(document), shard_tokens)))
the tokens are counted without the ends
- sum(file["tokens"] for file in files) => sum(file["tokens"] for file in files) - n_documents

# shuffled_index
the rounds mix with the old left half
- {r},{right}") => {r},{left}")
the epoch does not change the order
- {seed},{epoch}, => {seed},0,
a result outside is taken modulo n, so two places may meet
+ i %= n
  if i < n:
a result outside starts again with the next place
- i = left << k | right
+ place, i = i, left << k | right
+ i = i if i < n else (place + 1) % n
the halves are too wide for a power of four
- ((n - 1).bit_length() + 1) // 2 => (n.bit_length() + 1) // 2
a single thing needs no bits, but k is at least 1
- max(1, ((n - 1).bit_length() + 1) // 2) => max(2, ((n - 1).bit_length() + 1) // 2)
two rounds are made
- range(4) => range(2)
a place outside is not refused
- if not 0 <= i < n: => if n < 0:
the hash has 4 bytes
- text_hash(f"{seed},{epoch},{r},{right}") => text_hash(f"{seed},{epoch},{r},{right}", 4)

# ShardReader
a window ends where its shard ends
@@ _window
- found.append(self.shards[shard][offset : offset + stop - start])
+ found.append(self.shards[shard][max(0, min(offset, len(self.shards[shard]) + start - stop)) :][: stop - start])
the files are loaded as a whole
@@ __init__
+ self.shards = [np.array(shard) for shard in self.shards]
  self.ends = list(accumulate(map(len, self.shards)))
targets are the inputs
@@ __next__
- rows[:, 1:].clone() => rows[:, :-1].clone()
all epochs have the order of the first
@@ _window
- self.seed, epoch) => self.seed, 0)
windows overlap by the token of the shift
@@ _window
- i * self.length, (i + 1) * self.length + 1, [] => i * (self.length - 1), (i + 1) * (self.length - 1) + 2, []
the order is shuffled without a seed, too
@@ _window
- place if self.seed is None else shuffled_index(place, self.n_windows, self.seed, epoch)
+ shuffled_index(place, self.n_windows, self.seed or 0, epoch)
another corpus is not noticed: the state knows nothing of the manifest
@@ __init__
- shards.manifest_mark(manifest) => ""
two bytes are read for every id
@@ __init__
+ self.shards = [shard.astype(np.uint16) if len(shard) < 10**6 else shard for shard in self.shards]
  self.ends = list(accumulate(map(len, self.shards)))
seed 0 is taken for no seed
@@ _window
- self.seed is None => not self.seed
inputs and targets are views of one tensor, which are not contiguous
@@ __next__
- return rows[:, :-1].clone(), rows[:, 1:].clone() => return rows[:, :-1], rows[:, 1:]
""")
