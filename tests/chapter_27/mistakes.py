"""What goes wrong when people score models by hand."""

from lib.workbook.grading import edits

edits(r"""
# rolling_windows
later windows score as many tokens as the first one, so the first target has less context than was asked for
- return _windows(row, max_seq_len, max_seq_len - context_len + 1) => return _windows(row, max_seq_len, max_seq_len)
the windows overlap by context_len ids, one too many: the first target's own context includes the id just before it
- return _windows(row, max_seq_len, max_seq_len - context_len + 1)
+ return _windows(row, max_seq_len, max(1, max_seq_len - context_len))
a short last window gets fewer inputs, although more context would cost nothing
@@ _windows
- row[max(0, end - max_seq_len) : end] => row[max(0, end - max_seq_len, start - max_seq_len + stride) : end]
the inputs end with the last target, which the model then sees
@@ _windows
- row[max(0, end - max_seq_len) : end] => row[max(0, end - max_seq_len) + 1 : end + 1]
no prefix comes before the first token, so that token is never predicted
- row = [prefix_token, *(int(token) for token in tokens)] => row = [int(token) for token in tokens]
the tokens after the last full window are lost
@@ _windows
- start, end = end, min(end + stride, len(row) - 1)
+ start, end = end, end + stride if end + stride < len(row) else end
the check is in the generator: nothing is raised until somebody asks for the first window
- return _windows(row, max_seq_len, max_seq_len - context_len + 1)
+ yield from _windows(row, max_seq_len, max_seq_len - context_len + 1)
context_len is not checked: at 0 the first target of a later window has no id before it
- if not 1 <= context_len <= max_seq_len: => if False:

# bits_per_byte
the first logits of a window are taken: where it has fewer targets than inputs, the last ones score them
@@ _target_logits
- row[len(x) - len(y) : len(x)] => row[: len(y)]
the nats are divided by the number of tokens: that depends on the tokenizer, which bytes do not
- n_bytes += int(sizes.sum()) => n_bytes += len(targets)
nats are returned: a bit is ln 2 nats
- nats / (math.log(2) * n_bytes) => nats / n_bytes
special tokens are scored, although their bytes are not counted
- losses[sizes > 0].double().sum() => losses.double().sum()
the loss of special tokens is multiplied by 0, which is NaN where it is infinite
- losses[sizes > 0].double().sum() => (losses * (sizes > 0)).double().sum()
the mean of the windows' bits per byte is returned: short windows count as much as long ones
- nats += losses[sizes > 0].double().sum().item()
+ nats += losses[sizes > 0].double().sum().item() / max(1, int(sizes.sum()))
- n_bytes += int(sizes.sum()) => n_bytes += int(sizes.sum() > 0)
each window is a call of its own, whatever batch_size is
- while batch := list(itertools.islice(windows, batch_size)): => while batch := list(itertools.islice(windows, 1)):
the model is called with gradients on, which keeps every activation
- _target_logits(model, batch, prefix_token)
+ torch.enable_grad()(_target_logits.__wrapped__)(model, batch, prefix_token)
- losses = cross_entropy(
+ logits = logits.detach()
+ losses = cross_entropy(
the log-probabilities are computed in the dtype of the model's logits, which has 8 bits of mantissa in bfloat16
@@ _target_logits
- row.to(torch.promote_types(row.dtype, torch.float32)) => row
a text without bytes has 0 bits per byte: there is nothing to say about it
- raise ValueError("the text has no byte to score") => return 0.0
the windows are cut without context_len
- rolling_windows(tokens, prefix_token, max_seq_len, context_len) => rolling_windows(tokens, prefix_token, max_seq_len)

# encode_pair
the whole text is cut after as many tokens as the context alone has: a token that crosses the border is not scored
- cut = sum(1 for _ in same) => cut = len(alone)
the two texts are encoded apart, which gives ids that the whole text does not have
- return whole[:cut], whole[cut:] => return list(encode(context)), list(encode(continuation))
white space at the end of the context stays there, so a word that begins with a space is split
- end = len(context.rstrip()) => end = len(context)
only one space moves: all white space at the end should
- end = len(context.rstrip()) => end = len(context.removesuffix(" "))
white space at the end of the context is dropped instead of moved
- context[end:] + continuation => continuation
all places at which the two encodings agree are counted, also after the first difference
- cut = sum(1 for _ in same) => cut = sum(a == b for a, b in zip(whole, alone))
the last token of the context is always scored again
- cut = sum(1 for _ in same) => cut = max(0, sum(1 for _ in same) - 1)
without white space to move, context[-0:] is taken: that is the whole context, which is then scored too
- end = len(context.rstrip()) => end = -(len(context) - len(context.rstrip()))

# loglikelihood
the ids of a continuation stay on the CPU: with a model on a GPU, the logits are elsewhere
- torch.tensor(windows[i][1], device=logits.device) => torch.tensor(windows[i][1])
the mean over the continuation is returned instead of the sum
- cross_entropy(logits, ids, reduction="none").double().sum().item()
+ cross_entropy(logits, ids, reduction="none").double().mean().item()
the rows are padded on the left: positions move, and a causal model sees the padding
@@ _target_logits
- inputs + [pad_id] * (longest - len(inputs)) => [pad_id] * (longest - len(inputs)) + inputs
the last logits of a padded row are taken: those belong to padding
@@ _target_logits
- row[len(x) - len(y) : len(x)] => row[len(row) - len(y) :]
the scores come back in the order in which they were computed
- return answers => return [answers[i] for i in order] + [(0.0, True)] * (len(windows) - len(order))
the logits are read at the continuation's own positions, but position t predicts the id at t + 1
@@ _target_logits
- row[len(x) - len(y) : len(x)] => torch.cat([row[len(x) - len(y) + 1 : len(x)], row[len(x) - 1 : len(x)]])
a row that is too long loses its end: its beginning should go, because the continuation is at the end
- [*context, *continuation][-max_length - 1 :] => [*context, *continuation][: max_length + 1]
only max_length ids are kept, although the last of them is never passed
- [-max_length - 1 :] => [-max_length:]
the shortest come first: a memory that is too small shows at the end instead of at once
- key=lambda i: -len(windows[i][0]) => key=lambda i: len(windows[i][0])
the requests are not sorted, so short rows are padded to long ones
- sorted((i for i, (_, y) in enumerate(windows) if y), key=lambda i: -len(windows[i][0]))
+ [i for i, (_, y) in enumerate(windows) if y]
a continuation counts as greedy if its first token is the argmax: all of them must be
- bool((logits.argmax(-1) == ids).all()) => bool((logits.argmax(-1) == ids)[0])
a continuation counts as greedy if one of its tokens is the argmax: all of them must be
- bool((logits.argmax(-1) == ids).all()) => bool((logits.argmax(-1) == ids).any())
empty continuations are passed through the model, too
- (i for i, (_, y) in enumerate(windows) if y) => range(len(windows))
the softmax is taken in bfloat16 if the model is
@@ _target_logits
- row.to(torch.promote_types(row.dtype, torch.float32)) => row
the model is called with gradients on, which keeps every activation
- _target_logits(model, [windows[i] for i in batch], pad_id)
+ torch.enable_grad()(_target_logits.__wrapped__)(model, [windows[i] for i in batch], pad_id)
- log_prob = -cross_entropy(
+ logits = logits.detach()
+ log_prob = -cross_entropy(
a continuation that does not fit is cut, so part of it is never scored
- raise ValueError(f"request {i}: {len(continuation)} ids of continuation, but max_length = {max_length}")
+ continuation = continuation[-max_length:]
a tuple of logits and a loss is not unpacked
@@ _target_logits
- logits = logits[0] if isinstance(logits, tuple) else logits =>

# choose_answer
of equal scores the last wins
- scores.index(max(scores)) => max(range(len(scores)), key=lambda i: (scores[i], i))
the probability after an empty prompt is added: a choice that is likely anyway should lose by it
- s - float(v) if name == "unconditional" => s + float(v) if name == "unconditional"
the log-probability is multiplied by the length
- s / float(v) => s * float(v)
the log-probability is divided by the root of the length
- s / float(v) for => s / math.sqrt(v) for
1 is added to the length: long choices gain less than they should
- s / float(v) for => s / (float(v) + 1) for
the log-probabilities are divided, but the ratio of probabilities is their difference
- s - float(v) if name == "unconditional" else s / float(v) => s / float(v)
"byte" divides by the tokens
- {"n_tokens": n_tokens, "n_bytes": n_bytes, "unconditional": unconditional}
+ {"n_tokens": n_tokens, "n_bytes": n_tokens, "unconditional": unconditional}
NaN is compared like a number, and whether it wins depends on its place
- raise ValueError(f"choice {i}: its score is NaN") => pass
-inf is refused, although it is a score: such a choice only never wins
- if math.isnan(score): => if not math.isfinite(score):
lengths are checked whatever the normalization is
+ if any(v <= 0 for v in [*(n_tokens or []), *(n_bytes or [])]):
+     raise ValueError("0")
  if normalization not in needs:
a length below 0 turns the order around
- not value > 0 => value == 0
a list that is too short is padded by silence: only as many choices as it has are compared
- if values is None or len(values) != len(scores): => if values is None:
- pairs = zip(scores, values, strict=True) => pairs = zip(scores, values)

# few_shot_prompt
a copy of the question can be a shot, and shows its answer
- if i != index and example["query"] != asked["query"] => if i != index
whole examples are compared: a copy whose choices have another order is still the same question
- example["query"] != asked["query"] => example != asked
the question itself can be a shot
- if i != index and example["query"] != asked["query"] =>
every question gets the same shots: the seed should depend on the index
- random.Random(seed + index) => random.Random(seed)
the context ends with the delimiter, and the continuation begins with it again
- "".join(solved) + asked["query"], => "".join(solved) + asked["query"] + continuation_delimiter,
the continuations have no delimiter
- continuation_delimiter + choice for choice => choice for choice
the shots show their first choice instead of the right one
- s['choices'][s['gold']] => s['choices'][0]
the shots come in the order of the file: the sample has an order of its own
- random.Random(seed + index).sample(available, n_shots)
+ sorted(random.Random(seed + index).sample(available, n_shots))
one newline ends a shot: an empty line should follow it
- \n\n => \n
as many shots as there are are taken, and nobody learns that some are missing
- raise ValueError(f"n_shots = {n_shots}, but only {len(available)} other questions are available")
+ n_shots = len(available)

# wilson_interval
the normal interval around the share: it has no width at 0 and at n, and reaches below 0 near them
- middle = (p + z * z / (2 * n)) / wide => middle = p
- half = z / wide * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) => half = z * math.sqrt(p * (1 - p) / n)
the quantile is that of one side: level 0.95 leaves 2.5 % on each
- inv_cdf((1 + level) / 2) => inv_cdf(level)
the middle is the share itself: it should move towards a half
- middle = (p + z * z / (2 * n)) / wide => middle = p
the width is not divided by 1 + z^2/n
- half = z / wide * math.sqrt => half = z * math.sqrt
the ends at 0 and n are left to rounding, which misses 0.0 or 1.0 by a bit
- return 0.0 if n_correct == 0 else middle - half, 1.0 if n_correct == n else middle + half
+ return middle - half - 1e-17, middle + half + 1e-15
n = 0 gives a division by zero instead of a ValueError
- or n < 1 =>

# paired_difference
two questions are refused, as if fewer than three were too few
- n < 2 => n < 3
the variances of a and b, over n, are added as if the two had answered different questions
- variance = float((d * d).sum()) / (n * (n - 1)) + float(together.sum()) / n**2
+ variance = float(np.var(a) + np.var(b)) / n
the variances of a and b, over n - 1, are added as if the two had answered different questions
- variance = float((d * d).sum()) / (n * (n - 1)) + float(together.sum()) / n**2
+ variance = float(np.var(a, ddof=1) + np.var(b, ddof=1)) / n
the spread of one question is returned: the error of the mean is smaller by the root of n
- / (n * (n - 1)) + float(together.sum()) / n**2 => / (n - 1) + float(together.sum()) / n
the squares are divided by n^2 instead of n (n - 1)
- (n * (n - 1)) => n**2
the mean of the differences is not taken away before squaring
- d = d - mean =>
each question of a cluster is also paired with itself: that square is counted already
- np.bincount(place, d) ** 2 - np.bincount(place, d * d) => np.bincount(place, d) ** 2
each pair of a cluster counts once: both orders should
- float(together.sum()) / n**2 => float(together.sum()) / 2 / n**2
clusters are ignored
- labels = range(n) if clusters is None else clusters => labels = range(n if clusters is None else len(clusters))
equal labels count as one cluster only where they follow each other
- place = [number[label] for label in labels]
+ place = np.cumsum([i > 0 and labels[i] != labels[i - 1] for i in range(n)]).tolist()
the quantile is that of one side
- inv_cdf((1 + level) / 2) => inv_cdf(level)
b - a is returned
- [float(x) - float(y) for x, y in zip(a, b, strict=True)] => [float(y) - float(x) for x, y in zip(a, b, strict=True)]
labels are sorted, which fails if they are of several kinds
- dict.fromkeys(labels) => sorted(set(labels))
one question gives a division by zero instead of a ValueError
- or n < 2 =>

# core_score
a task that knows everything gets 1 - baseline: the difference is not divided by what was left to gain
- (a - baselines[task]) / (1 - baselines[task]) => a - baselines[task]
the difference is divided by the baseline
- / (1 - baselines[task]) => / (baselines[task] or 1)
worse than guessing counts as guessing, so noise only ever adds to the score
- (a - baselines[task]) / (1 - baselines[task]) for => max(0.0, (a - baselines[task]) / (1 - baselines[task])) for
the mean is of the accuracies
- fmean(centered.values()) => fmean(accuracies.values())
tasks without a baseline are left out in silence
- if alone := sorted(accuracies.keys() ^ baselines.keys()):
+ accuracies = {task: a for task, a in accuracies.items() if task in baselines}
+ if alone := sorted(accuracies.keys() - baselines.keys()):
only tasks without a baseline are named, not baselines without a task
- accuracies.keys() ^ baselines.keys() => accuracies.keys() - baselines.keys()
a baseline of 1 is divided by
- 0 <= baseline < 1 => 0 <= baseline <= 1

# extract_answer
the first number is taken: a solution ends in its answer
- _canonical(*found[-1]) => _canonical(*found[0])
a "-" between two numbers is read as the sign of the second
- (?:(?<![\w.)\]])-)? => -?
commas end a number, so 1,234 is 234
- (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+) => (?:[0-9]+)
every comma between digits is taken for one of thousands, so the list 1,2,3 is 123
- (?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+) => (?:[0-9]+(?:,[0-9]+)*)
a group of three digits may be followed by a fourth
- (?![0-9]) =>
decimals are not read
- (?:\.([0-9]+))? => (?:\.([0-9]+)(?!.))?
zeros at the end of the decimal part stay
@@ _canonical
- decimals.rstrip("0") => decimals
zeros in front stay
@@ _canonical
- .lstrip("0") or "0" =>
zeros at the end of a whole number are removed, too: 10 becomes 1
@@ _canonical
- return number if number == "0" else sign + number
+ return number if number == "0" else sign + (number.rstrip("0") or "0")
0 keeps its sign
@@ _canonical
- number if number == "0" else sign + number => sign + number
the number goes through a float, which keeps 16 digits and writes 0.00001 as 1e-05
@@ _canonical
- return number if number == "0" else sign + number
+ value = float(sign + number)
+ return str(int(value)) if value.is_integer() else str(value)
digits of all scripts count
- ((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)) => ((?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|\d+))
the first "answer" is taken: a solution may correct itself
- "".join(answers[-1]) => "".join(answers[0])
a word that begins with the letter is taken for it: Dublin for D
- |\b({letter})\b)" => |\b({letter}))"
the article A at the beginning of a sentence is taken for the answer
- (?:[).:](?:\s.*)?)? => (?:[).:]?(?:\s.*)?)?
the letter is found in lower case, too: the article "a" and the c of "is c" are no answers
- \b({letter})\b)", text) => \b({letter})\b)", text.upper())
"answer" is only found in lower case
- (?i:answer => (?:answer
any capital letter counts, however many choices there are
- string.ascii_uppercase[:n_choices] => string.ascii_uppercase
an unknown kind is read as "letter"
- raise ValueError(f"kind = {kind!r}: expected 'number' or 'letter'") => pass

# pass_at_k
k samples are drawn independently, each right with probability c/n: this underestimates, as none is drawn twice
- return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few))) => return 1 - (1 - c / n) ** k
k draws are taken as k tries at c/n each: that exceeds 1
- return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few))) => return min(1.0, c / n * k)
the probability that all k are wrong is returned
- return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))
+ return math.exp(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))
fewer wrong samples than k are not noticed: a factor of 0 or less appears
- if n - c < k: => if n - c < k - 1:
the binomial coefficients are converted to floats, which end at 1e308
- return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))
+ return 1 - float(math.comb(n - c, k)) / float(math.comb(n, k))
the product is subtracted from 1 in float32, which leaves 7 digits
- return 0.0 - math.expm1(math.fsum(math.log1p(-many / (n - i)) for i in range(few)))
+ product = np.float32(1)
+ for i in range(few):
+     product *= np.float32(1) - np.float32(many / (n - i))
+ return float(1 - product)
k = 0 is allowed
- or not 1 <= k <= n: => or not 0 <= k <= n:
more right samples than samples are allowed
- if not 0 <= c <= n or => if not 0 <= c or

# expected_calibration_error
every bin that holds answers counts the same: a bin should count as often as it has answers
- return torch.bincount(place, right - sure, n_bins).abs().sum().item() / len(sure)
+ sizes = torch.bincount(place, minlength=n_bins)
+ gaps = torch.bincount(place, right - sure, n_bins) / sizes
+ return gaps[sizes > 0].abs().mean().item()
every bin counts the same, also the empty ones: a bin should count as often as it has answers
- return torch.bincount(place, right - sure, n_bins).abs().sum().item() / len(sure)
+ sizes = torch.bincount(place, minlength=n_bins).clamp(min=1)
+ return (torch.bincount(place, right - sure, n_bins) / sizes).abs().mean().item()
the differences are summed before the magnitude is taken, so too sure and not sure enough cancel
- torch.bincount(place, right - sure, n_bins).abs().sum().item()
+ torch.bincount(place, right - sure, n_bins).sum().abs().item()
each answer's own distance is summed: no bins at all
- torch.bincount(place, right - sure, n_bins).abs().sum().item() => (right - sure).abs().sum().item()
an edge belongs to the bin above it: 0.5 of 2 bins should be in the first
- torch.bucketize(sure, edges) - 1).clamp(min=0) => torch.bucketize(sure, edges, right=True) - 1).clamp(max=n_bins - 1)
a confidence of 0 is in no bin, because every bin is open at its lower edge: the first should hold it
- bincount(place, right - sure, n_bins) => bincount(place, (right - sure) * (sure > 0), n_bins)
confidences are read in float32, where edges move
- torch.as_tensor(x, dtype=torch.float64) => torch.as_tensor(x, dtype=torch.float32).double()
the bin is computed as ceil(confidence * n_bins) - 1, whose product rounds across an edge
- (torch.bucketize(sure, edges) - 1).clamp(min=0) => ((sure * n_bins).ceil() - 1).clamp(min=0).long()
NaN and confidences above 1 are put into the last bin
- outside = sure[~((sure >= 0) & (sure <= 1))]
+ sure = sure.nan_to_num(1.0).clamp(0, 1)
+ outside = sure[:0]
only numbers outside are found, not NaN: a comparison with NaN is False
- sure[~((sure >= 0) & (sure <= 1))] => sure[(sure < 0) | (sure > 1)]

# contaminated_share
different grams are counted, not places
- grams.append(list(_grams(words, min(n, len(words)))))
+ grams.append(list(dict.fromkeys(_grams(words, min(n, len(words))))))
the corpus is joined to one text, so grams run across two documents
- for words in map(_words, corpus): => for words in [_words(" ".join(corpus))]:
the whole corpus is kept in memory
- for words in map(_words, corpus): => for words in map(_words, list(corpus)):
the document stays alive until the next one has been read
- for words in map(_words, corpus):
+ for document in corpus:
+     words = _words(document)
every gram of the corpus is kept, so memory grows with the corpus
- for gram in _grams(words, length) if gram in wanted => for gram in _grams(words, length)
a text of fewer than n words has no gram, so its copy is not found
- min(n, len(words)) => n
the texts are compared as they are: upper case is another word
@@ _words
- text.lower() => text
words are split at spaces only, so "cat," is another word than "cat"
@@ _words
- re.findall(r"\w+", text.lower()) => text.lower().split()
an underscore ends a word, as in chapter 26's `normalize`
@@ _words
- r"\w+" => r"[^\W_]+"
accents are taken off, as in chapter 26's `normalize`
@@ _words
+ import unicodedata
+ plain = unicodedata.normalize("NFKD", text.lower())
+ return re.findall(r"\w+", "".join(c for c in plain if not unicodedata.combining(c)))
a text that comes twice has one share: a list has one for each text
- for text in texts: => for text in dict.fromkeys(texts):
a gram is searched as a string, which also finds it inside of longer words
- seen.update(gram for length in lengths for gram in _grams(words, length) if gram in wanted)
+ seen.update(gram for gram in wanted if " ".join(gram) in " ".join(words))
a text counts as a whole: 1 if any gram is found
- sum(gram in seen for gram in row) / max(1, len(row)) => float(any(gram in seen for gram in row))
a text without words is divided by 0
- max(1, len(row)) => len(row)
""")
