"""The check that notebooks and library agree: on a copy of this repository, drift of each kind is caught, and an export repairs it."""
import configparser
import json
import re
import shutil
from pathlib import Path

import pytest

from scalecua_nb.dev import sync
from scalecua_nb.dev.site import complete_sidebar

ROOT = sync.checkout()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    "A copy of the repository whose library is freshly exported and whose notebooks are clean."
    copy = sync.fresh_export(ROOT, tmp_path_factory.mktemp("checkout"))
    sync.clean_notebooks(copy)
    return copy


@pytest.fixture
def project(exported, tmp_path):
    shutil.copytree(exported, tmp_path / "project")
    return tmp_path / "project"


def drift(project, tmp_path):
    (tmp_path / "fresh").mkdir()
    return {(d.path, d.kind) for d in sync.compare(project, sync.fresh_export(project, tmp_path / "fresh"))}


def edit(notebook: Path, old: str, new: str):
    text = notebook.read_text(encoding="utf-8")
    assert old in text
    notebook.write_text(text.replace(old, new), encoding="utf-8")


def test_a_fresh_export_has_no_drift(project):
    assert sync.sync_problems(project) == []


def test_drift_of_each_kind_is_caught(project, tmp_path):
    by_hand = project / "scalecua_nb/core/actions.py"
    by_hand.write_text(by_hand.read_text() + "\nby_hand = True\n")
    edit(project / "nbs/dev/sync.ipynb", "What a committed notebook should not hold.", "What no committed notebook should hold.")   # and not exported
    shutil.copy(project / "scalecua_nb/core/paths.py", project / "scalecua_nb/core/paths_old.py")
    (project / "scalecua_nb/core/store.py").unlink()
    (project / "scalecua_nb/dev/__init__.py").unlink()
    assert drift(project, tmp_path) == {
        ("scalecua_nb/core/actions.py", "changed"), ("scalecua_nb/dev/sync.py", "changed"), ("scalecua_nb/core/paths_old.py", "stale"),
        ("scalecua_nb/core/store.py", "missing"), ("scalecua_nb/dev/__init__.py", "missing")}


def test_the_module_of_a_renamed_notebook_is_caught_and_removed(project, tmp_path):
    old = project / "nbs/dev/experiments.ipynb"
    old.rename(project / "nbs/dev/trials.ipynb")
    edit(project / "nbs/dev/trials.ipynb", "default_exp dev.experiments", "default_exp dev.trials")
    assert drift(project, tmp_path) == {("scalecua_nb/dev/experiments.py", "stale"), ("scalecua_nb/dev/trials.py", "missing"),
                                        ("scalecua_nb/_modidx.py", "changed")}
    sync.rewrite_library(project)
    assert not (project / "scalecua_nb/dev/experiments.py").exists() and (project / "scalecua_nb/dev/trials.py").exists()


def test_a_notebook_that_cannot_be_exported_leaves_the_library_alone(project):
    before = {p: p.read_bytes() for p in sync.generated_modules(project)}
    edit(project / "nbs/dev/sync.ipynb", "def checkout() -> Path:", "def checkout( -> Path:")
    with pytest.raises(RuntimeError, match="could not export"):
        sync.rewrite_library(project)
    assert {p: p.read_bytes() for p in sync.generated_modules(project)} == before


def test_blemishes_are_named_and_cleaned(project):
    path = project / "nbs/dev/sync.ipynb"
    notebook = json.loads(path.read_text())
    cell = next(c for c in notebook["cells"] if c["cell_type"] == "code")
    cell["execution_count"], cell["metadata"] = 3, {"collapsed": True}
    cell["outputs"] = [{"output_type": "stream", "name": "stdout", "text": [f"{project}/runs\n"]}]
    path.write_text(json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    assert [line.split(" ", 1)[1].split(" (")[0] for line in sync.blemishes(path, project)] == ["is not clean", "shows a path of this machine"]
    assert sync.clean_notebooks(project) == ["nbs/dev/sync.ipynb"]
    assert sync.clean_notebooks(project) == []


def test_the_sidebar_lists_every_notebook(project):
    shutil.copy(project / "nbs/core/actions.ipynb", project / "nbs/core/zz_new.ipynb")
    assert "nbs/sidebar.yml does not list core/zz_new.ipynb" in complete_sidebar(project)
    assert complete_sidebar(project) == []


def test_versions_and_interpreters_agree():
    "settings.ini is nbdev's, pyproject.toml is pip's."
    settings = configparser.ConfigParser(interpolation=None)
    settings.read(ROOT / "settings.ini", encoding="utf-8")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    said = lambda key: re.search(rf'^{key} = "([^"]+)"', pyproject, re.MULTILINE).group(1)
    assert said("version") == settings["DEFAULT"]["version"]
    assert said("requires-python") == ">=" + settings["DEFAULT"]["min_python"]
    assert said("name") == settings["DEFAULT"]["lib_name"]
