"""The command line: what it prints, and that errors are one line and exit code 2."""

import subprocess
import sys

import pytest

import jaxkv
from jaxkv import cli

pytestmark = pytest.mark.usefixtures("compiled_quickly")


@pytest.fixture
def run(monkeypatch, capsys, shallow):
    """Runs the command in this process with the model of the suite."""

    def call(*args, stdin=""):
        import io

        load = jaxkv.load
        monkeypatch.setattr(
            jaxkv, "load", lambda name: shallow if name == "smollm2-135m" else load(name)
        )
        monkeypatch.setattr(sys, "argv", ["jaxkv", *args])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            cli.main()
        captured = capsys.readouterr()
        return end.value.code, captured.out, captured.err

    return call


def test_generate_prints_the_text_and_the_report(run, shallow):
    code, out, err = run(
        "generate", "smollm2-135m", "Once upon a time", "--policy", "h2o", "--budget", "16",
        "--max-new-tokens", "20",
    )  # fmt: skip
    want = jaxkv.generate(shallow, "Once upon a time", policy="h2o", budget=16, max_new_tokens=20)
    assert code == 0
    assert out == want.text + "\n"
    assert "16 tokens (heavy 8, recent 8)" in err


def test_chat_keeps_one_cache_over_its_turns(run):
    code, out, _ = run(
        "chat", "smollm2-135m", "--policy", "h2o", "--budget", "24", "--max-new-tokens", "8",
        stdin="Hello\nAnd now?\n",
    )  # fmt: skip
    assert code == 0
    assert out.count("tokens kept") == 2
    assert "24 of" in out


def test_perplexity(run, shallow, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("The sea was calm. The sea was blue. The sea was calm again.")
    code, out, _ = run("perplexity", "smollm2-135m", str(file), "--policy", "window")
    want = jaxkv.perplexity(shallow, file.read_text(), policy="window")
    assert code == 0
    assert f"perplexity {want:.4f}" in out


def test_lists(run):
    code, out, _ = run("policies")
    assert code == 0
    for name in ("full", "window", "streaming", "h2o", "heavy", "random", "2309.17453"):
        assert name in out
    code, out, _ = run("models")
    assert code == 0
    assert "smollm2-135m" in out
    assert "GPTNeoXForCausalLM" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate", "smollm-135m", "x"], "did you mean 'smollm2-135m'"),
        (["generate", "smollm2-135m", "x", "--policy", "h20"], "did you mean 'h2o'"),
        (["generate", "smollm2-135m", "x", "--budget", "1.5"], r"in \(0, 1\], got 1.5"),
        (["generate", "smollm2-135m", "x", "--budget", "many"], "got 'many'"),
        (["generate", "smollm2-135m", ""], "is empty"),
        (["generate", "smollm2-135m", "x", "--max-new-tokens", "0"], "got 0"),
        (["generate", "smollm2-135m", "x", "--max-new-tokens", "x"], "valid integer"),
        (["generate", "smollm2-135m", "x", "--nonsense"], "--nonsense"),
        (["generate"], "'model'"),
        (["nonsense"], "'nonsense'"),
        (["perplexity", "smollm2-135m", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_errors_are_one_line_and_exit_with_2(run, args, message):
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1
    assert err.startswith("jaxkv: ")
    import re

    assert re.search(message, err)


def test_the_installed_command_has_no_traceback():
    done = subprocess.run(
        [sys.executable, "-m", "jaxkv", "generate", "no/such/model", "x"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "unknown model" in done.stderr
