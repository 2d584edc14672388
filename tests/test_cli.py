"""The command line from outside: what a person and a script see of results, mistakes, bugs and Ctrl-C."""
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from scalecua_nb.dev.sync import checkout

WORK = '''
import asyncio, errno, os, subprocess, time
from pathlib import Path

class Trouble(ValueError): "A mistake of the caller's."
Trouble.__module__ = "scalecua_nb.toy"

def result(size: int = 3,        # how many
           label: str = "x",     # what to call it
           ) -> dict:
    "Make a record, noisily."
    print("progress")
    subprocess.run(["echo", "a program's progress"])
    return dict(size=size, label=label, nothing=float("nan"), where=Path("runs/x"))

async def later(size: int = 1) -> dict:  # how many
    "The same, async."
    await asyncio.sleep(0)
    return dict(size=size)

def mistake(): "Refuse."; raise Trouble("there is no pool 'x'; make one with ./scalecua verigen.")
def bug(): "Break."; raise KeyError("oops")
def full(): "Fill the disk."; raise OSError(errno.ENOSPC, "No space left on device", "log.csv")
def absent(): "Import."; import a_package_that_is_not_here
def slow(): "Wait."; Path(os.environ["STARTED"]).touch(); time.sleep(60)

async def together():
    "Two at once, one of which refuses."
    class Group(Exception): exceptions = [Trouble("a member refuses.")]
    raise Group()
'''
MAIN = "import scalecua_nb.cli as cli\nfor name in 'result later mistake bug full absent slow together'.split(): cli.add_job(cli.app, name, f'toy_work:{name}', name)\ncli.main()\n"


@pytest.fixture
def scalecua(tmp_path):
    (tmp_path / "toy_work.py").write_text(textwrap.dedent(WORK))
    (tmp_path / "toy_main.py").write_text(MAIN)
    environment = os.environ | dict(PYTHONPATH=f"{tmp_path}:{checkout()}", NO_COLOR="1", COLUMNS="100", STARTED=str(tmp_path / "started"))

    def start(*words):
        return subprocess.Popen([sys.executable, tmp_path / "toy_main.py", *words], env=environment, cwd=tmp_path, text=True,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def run(*words):
        process = start(*words)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err
    run.start, run.folder = start, tmp_path
    return run


def test_a_result_is_one_line_of_json_and_all_else_goes_to_stderr(scalecua):
    code, out, err = scalecua("result", "--size", "5")
    assert code == 0 and out.count("\n") == 1
    assert json.loads(out) == dict(size=5, label="x", nothing=None, where="runs/x")
    assert err.splitlines() == ["progress", "a program's progress"]
    assert scalecua("later")[:2] == (0, '{"size": 1}\n')


def test_help_is_the_signature(scalecua):
    code, out, _ = scalecua("result", "--help")
    assert code == 0 and "Make a record, noisily." in out and "--size" in out and "how many" in out and "default: 3" in out


@pytest.mark.parametrize("command, code, words", [("mistake", 2, "there is no pool 'x'"), ("full", 1, "no space left"), ("absent", 1, "not installed"),
                                                  ("together", 2, "a member refuses.")])
def test_what_went_wrong_is_one_sentence(scalecua, command, code, words):
    returned, out, err = scalecua(command)
    assert (returned, out) == (code, "") and words in err and err.count("\n") == 1
    assert "Traceback" in scalecua("--debug", command)[2]


def test_a_bug_keeps_its_traceback(scalecua):
    code, _, err = scalecua("bug")
    assert code == 1 and "Traceback" in err and "KeyError: 'oops'" in err


def test_an_unknown_option_or_command_is_refused(scalecua):
    assert scalecua("result", "--sise", "5")[0] == 2
    assert scalecua("resalt")[0] == 2
    code, _, err = scalecua("result", "--size", "many")
    assert code == 2 and "Traceback" not in err


def test_ctrl_c_says_what_was_kept(scalecua):
    process = scalecua.start("slow")
    for _ in range(300):
        if (scalecua.folder / "started").exists(): break
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (130, "") and err.startswith("scalecua: interrupted; what was saved is good")
