"""`./scalecua` where it may install, where it may not, and where nothing is missing; with stand-ins for the programs that would change this machine."""
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from scalecua_nb.dev.sync import checkout

ROOT = checkout()
TOOLS = "bash env readlink dirname cat sha256sum cut sed awk mkdir flock uname rm mktemp tee sh sleep chmod cp".split()


class Machine:
    "A clone in a folder with a space in its name, and a PATH that holds a few tools and what a test puts there."

    def __init__(self, folder: Path):
        self.root, self.bin = folder / "a clone", folder / "bin"
        self.root.mkdir()
        self.bin.mkdir()
        (self.root / "docker").mkdir()
        for name in ("scalecua", "pyproject.toml", "docker/packages.txt"):
            shutil.copy(ROOT / name, self.root / name)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.program("id", 'case $1 in -u) echo 1000 ;; *) echo somebody ;; esac')
        self.program("dpkg-query", "exit 1")

    def program(self, name: str, script: str, where: Path | None = None):
        path = (where or self.bin) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def python(self):
        "A python3 whose virtual environments are stand-ins that log what they are asked to do."
        self.program("python3", f'''
case "$1 $2" in
  "-m venv") for last; do :; done; mkdir -p "$last/bin"; cp "{self.bin}/venv-python" "$last/bin/python" ;;
  *) exec "{sys.executable}" -S "$@" ;;
esac''')
        self.program("venv-python", f'''
case "$1 $2 $3" in
  "-m pip install") echo install >> "{self.root}/log"; sleep 0.5; [ -z "$PIP_BREAKS" ] || {{ echo "ERROR: no network"; exit 1; }} ;;
  "-m pip "*) ;;
  *) echo "run: $*" ;;
esac''')

    def set_up(self):
        "What a finished set-up leaves behind."
        self.program("python", 'echo "run: $*"', self.root / ".venv/bin")
        for program in ("bwrap", "Xvfb", "openbox", "soffice"):
            self.program(program, "exit 0")
        (self.root / ".cache").mkdir(exist_ok=True)
        for name, file in (("python", "pyproject.toml"), ("desktop", "docker/packages.txt")):
            content = f"{self.root}\n".encode() + (self.root / file).read_bytes()
            (self.root / ".cache" / name).write_text(hashlib.sha256(content).hexdigest() + "\n")

    def start(self, *words, cwd="/", **environment):
        return subprocess.Popen([self.root / "scalecua", *words], cwd=cwd, env=dict(PATH=str(self.bin), HOME="/nonexistent", **environment),
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def run(self, *words, **options):
        process = self.start(*words, **options)
        out, err = process.communicate(timeout=60)
        return process.returncode, out, err


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_help_needs_nothing(machine):
    for words in ((), ("--help",), ("-h",)):
        code, out, _ = machine.run(*words)
        assert code == 0 and "usage: ./scalecua COMMAND" in out
    assert not (machine.root / ".venv").exists() and not (machine.root / ".cache").exists()


def test_help_names_every_command():
    "The text that needs no Python and the command line that does say the same."
    from typer.main import get_command

    from scalecua_nb.cli import app
    text = (ROOT / "scalecua").read_text()
    named = set(re.findall(r"^  (\w+)  +\S", text[text.index("usage: ./scalecua"):text.index("The first command")], re.MULTILINE))
    assert named == set(get_command(app).commands)


def test_without_root_or_sudo_the_exact_line_is_printed(machine):
    machine.program("apt-get", "exit 99")
    machine.python()
    code, out, err = machine.run("demo")
    listed = [re.sub(r"#.*", "", line).strip() for line in (ROOT / "docker/packages.txt").read_text().splitlines()]
    line = "  apt-get update && apt-get install -y --no-install-recommends " + " ".join(p for p in listed if p)
    assert code == 1 and out == "" and line in err.splitlines() and "as root" in err
    assert not (machine.root / ".venv").exists()


def test_with_a_sudo_that_asks_the_line_begins_with_it(machine):
    machine.program("apt-get", "exit 99")
    machine.program("sudo", "exit 1")
    machine.python()
    code, _, err = machine.run("demo")
    assert code == 1 and any(l.startswith("  sudo apt-get update && sudo apt-get install -y") for l in err.splitlines())


def test_one_line_covers_a_missing_python_too(machine):
    machine.program("apt-get", "exit 99")
    code, _, err = machine.run("demo")
    line = next(l for l in err.splitlines() if "apt-get install" in l)
    assert code == 1 and line.endswith("python3 python3-venv") and " xvfb " in line


def test_not_debian(machine):
    machine.python()
    code, _, err = machine.run("demo")
    assert code == 1 and "neither Debian nor Ubuntu" in err and "bubblewrap" in err


def test_an_old_python_is_refused(machine):
    machine.program("python3", 'case $1 in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac')
    code, _, err = machine.run("docs")
    assert code == 1 and "Python 3.10 or newer is needed and this is Python 3.9.2" in err


def test_namespaces_that_are_forbidden(machine):
    machine.set_up()
    machine.program("bwrap", 'echo "bwrap: No permissions to create new namespace" >&2; exit 1')
    code, out, err = machine.run("demo")
    assert code == 1 and out == "" and "user namespace" in err
    assert machine.run("docs")[0] == 0                      # what starts no desktop goes on


def test_nothing_missing_nothing_done(machine):
    machine.set_up()
    before = sorted(p for p in machine.root.rglob("*"))
    code, out, err = machine.run("train", "--out", "my runs/a", cwd="/tmp")
    assert (code, out, err) == (0, "run: -m scalecua_nb.cli train --out my runs/a\n", "")
    assert sorted(p for p in machine.root.rglob("*")) == before
    (machine.root / "docker/packages.txt").write_text("xvfb\nfonts-new\n")   # the list grew: set-up is due again
    assert machine.run("train")[0] == 1


def test_simulated_desktops_need_no_debian_packages(machine):
    machine.python()
    code, out, _ = machine.run("train", SCALECUA_NO_DESKTOPS="1")
    assert (code, out) == (0, "run: -m scalecua_nb.cli train\n")


def test_two_at_once_install_once(machine):
    machine.python()
    both = [machine.start("docs"), machine.start("docs")]
    outcomes = [(*p.communicate(timeout=60), p.returncode) for p in both]
    assert [(out, code) for out, _, code in outcomes] == [("run: -m scalecua_nb.cli docs\n", 0)] * 2
    assert (machine.root / "log").read_text() == "install\n"
    assert sum("waiting for it" in err for _, err, _ in outcomes) == 1


def test_an_interrupted_set_up_is_repaired(machine):
    machine.python()
    code, _, err = machine.run("docs", PIP_BREAKS="1")
    assert code == 1 and "ERROR: no network" in err and "pip install -e" in err
    assert machine.run("docs")[0] == 0
    (machine.root / ".venv/bin/python").unlink()            # half an environment
    code, out, _ = machine.run("docs")
    assert (code, out) == (0, "run: -m scalecua_nb.cli docs\n")


def test_an_environment_of_a_clone_that_was_moved_is_repaired(machine):
    machine.python()
    assert machine.run("docs")[0] == 0
    moved = machine.root.parent / "moved"
    machine.root.rename(moved)
    machine.root = moved
    assert machine.run("docs")[0] == 0 and (moved / ".cache/python").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere; run as another user")
def test_a_clone_that_is_not_ours(machine):
    machine.root.chmod(0o555)
    code, _, err = machine.run("docs")
    machine.root.chmod(0o755)
    assert code == 1 and "not writable" in err
