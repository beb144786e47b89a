"""The program that sends one load to the book's server and to Transformers'."""

from pathlib import Path

from lib.bench import load, servers


def options(*words):
    return servers.make_parser().parse_args(["--device", "cpu", "--seconds", "5", "--warm-up", "1", *words])


def beginnings(tmp_path, *, alike):
    trace = tmp_path / "trace.jsonl"
    servers.write_trace(trace, 4.0, options(), alike=alike)
    return [ask.fields["prompt"] for ask in load.read_trace(trace)]


def test_prompts_begin_alike_or_from_the_first_word_on_not(tmp_path):
    alike, different = beginnings(tmp_path, alike=True), beginnings(tmp_path, alike=False)
    assert [len(p.split()) for p in alike] == [len(p.split()) for p in different]
    assert len({tuple(p.split()[: servers.COMMON]) for p in alike}) == 1
    assert len({p.split()[0] for p in different}) == len(different) > 5


def test_a_server_that_does_not_keep_up_gets_no_higher_rate(tmp_path, monkeypatch):
    sent = []

    def run(asked):
        sent.append(asked.rate)
        return {"all": {"server_kept_up": asked.rate[0] < 16}}

    monkeypatch.setattr(load, "run", run)
    asked = options("--rate", "4", "16", "64")
    found = servers.measure(servers.TRANSFORMERS, "http://here", tmp_path, asked)
    assert sent == [[4.0], [16.0]]
    assert list(found) == ["4", "16"]


def test_each_server_gets_the_folder_and_only_one_a_small_cache():
    folder = Path("llama")
    words = {name: servers.command(name, folder, options("--blocks", "7")) for name in servers.SERVERS}
    assert all(str(folder) in line and "8199" in line for line in words.values())
    assert [name for name, line in words.items() if "--blocks" in line] == [servers.TIGHT]
    assert sorted(sum(servers.SERVERS.values(), ())) == sorted(servers.LOADS)


def test_a_divided_server_is_told_its_ranks_and_one_prompt_at_a_time_waits_for_its_answer():
    folder, asked = Path("llama"), options()
    assert "--tensor" not in servers.command(servers.BOOK, folder, asked)
    asked.ranks = 2
    line = servers.command(servers.BOOK, folder, asked)
    assert line[line.index("--tensor") + 1] == "2"
    words = servers.load_words(servers.ALONE, 1.0, folder, asked)
    assert words[: words.index("--prompt-words")] == ["--streams", "1"]
    assert "--rate" not in words
