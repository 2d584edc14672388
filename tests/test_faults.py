"Damaged files, wrong folders and second runs: one sentence that names the file, status 2 for the caller's mistake, nothing overwritten."
import asyncio, errno, hashlib, json
from types import SimpleNamespace
import pytest
from safetensors import SafetensorError
from scalecua_nb.cli import main
from scalecua_nb.core.tasks import PoolError, TaskError, TaskPool, parse_task
from scalecua_nb.demo import Phases
from scalecua_nb.engine.tiny_model import build_tiny_model
from scalecua_nb.core.config import load_preset
from scalecua_nb.eval.benchmark import BenchmarkError, _Log
from scalecua_nb.launch.local import TaskSet, load_model
from scalecua_nb.launch.train import _probed, save_policy, train
from scalecua_nb.rl.checkpoint import CheckpointError, Checkpoints, OtherRun, atomic_folder
from scalecua_nb.verigen.loop import only_writer

TASK = dict(id="one", instruction="press A", snapshot="minidesk", evaluator=dict(func="check_a", result=dict(type="a")))
FUNCTIONS = dict(get_a="def get_a(env, config): return 1\n", check_a="def check_a(result, expected, **options): return 1.0\n")

@pytest.fixture
def pool(tmp_path):
    pool = TaskPool(tmp_path / "pool", create=True)
    pool.add(parse_task(TASK), FUNCTIONS)
    return pool.path

def refused(capsys, *arguments, naming):
    with pytest.raises(SystemExit) as ended: main([str(a) for a in arguments])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said and str(naming) in said.splitlines()[-1]

def entry(pool): return json.loads((pool / "catalog.jsonl").read_text())

@pytest.mark.parametrize("change", [dict(id=[1]), dict(files=[1]), dict(files={}), dict(annotations=3), dict(files=None), None], ids=str)
def test_a_damaged_catalogue_line_is_named(pool, change):
    row = {k: v for k, v in {**entry(pool), **(change or {"files": "?"})}.items() if v is not None}
    (pool / "catalog.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(PoolError, match="catalog.jsonl: the line at byte 0"): TaskPool(pool)

@pytest.mark.parametrize("data", [b"{oops", b"\xff\xff", b"[" * 100_000, json.dumps({**TASK, "id": "two"}).encode()], ids=["cut", "not text", "deep", "another id"])
def test_a_task_whose_hash_agrees_is_still_read_with_care(pool, data):
    (pool / "tasks/one.json").write_bytes(data)
    row = entry(pool); row["files"]["tasks/one.json"] = hashlib.sha256(data).hexdigest()
    (pool / "catalog.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(TaskError, match="tasks/one.json"): TaskPool(pool)["one"]

def _edit(folder, change):
    config = json.loads((folder / "config.json").read_text()); change(config); (folder / "config.json").write_text(json.dumps(config))

@pytest.mark.parametrize("damage", [
    lambda f: (f / "model.safetensors").unlink(),
    lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-100]),
    lambda f: (f / "config.json").write_text("{"),
    lambda f: _edit(f, lambda c: c.update(model_type="bert")),
    lambda f: _edit(f, lambda c: c["text_config"].update(hidden_size=2 * c["text_config"]["hidden_size"])),
    lambda f: _edit(f, lambda c: c["text_config"].update(num_hidden_layers=2 + c["text_config"]["num_hidden_layers"])),
], ids=["no weights", "cut weights", "cut config", "another architecture", "another shape", "more layers than weights"])
def test_a_model_folder_that_does_not_hold_the_model(tmp_path, damage):
    folder = save_policy(build_tiny_model(seed=0), tmp_path / "model")
    load_model(load_preset("demo"), folder)
    damage(folder)
    with pytest.raises(ValueError, match=str(folder)): load_model(load_preset("demo"), folder)

@pytest.mark.parametrize("text", ["{", "[]", "null", '{"cloning": 3}', '{"cloning": {}}', '{"cloning": {"seconds": "x", "result": 1}}'])
def test_damaged_phases(tmp_path, text):
    (tmp_path / "phases.json").write_text(text)
    with pytest.raises(ValueError, match="phases.json"): Phases(tmp_path, resume=True)

@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_damaged_benchmark(tmp_path, text):
    (tmp_path / "benchmark.json").write_text(text)
    with pytest.raises(BenchmarkError, match="benchmark.json"): _Log(tmp_path, dict(seed=0))

@pytest.mark.parametrize("text", ["{", "{}", '{"rates": {"one": "x"}, "rollouts": 1, "turns": 1}', '{"rates": {"of another pool": 0.5}, "rollouts": 1, "turns": 1}'])
def test_damaged_pass_rates(tmp_path, pool, text):
    file = tmp_path / "pass_rates.json"; file.write_text(text)
    parts = SimpleNamespace(config=load_preset("demo"))
    with pytest.raises(ValueError, match="pass_rates.json: not the pass rates of this pool"):
        asyncio.run(_probed(file, parts, TaskSet.of_pool(TaskPool(pool)), None, "train"))

def test_training_into_another_runs_folder_changes_nothing(tmp_path, pool):
    out = tmp_path / "run"; Checkpoints(out / "checkpoints", identity=dict(stage="another")).save(1, {})
    (out / "config.toml").write_text("its settings")
    with pytest.raises(OtherRun, match="belongs to another run"): train(str(pool), "tiny", str(out))
    assert (out / "config.toml").read_text() == "its settings" and not (out / "metrics.csv").exists()

def test_two_runs_cannot_train_into_one_folder(tmp_path, pool):
    with only_writer(tmp_path / "run"), pytest.raises(ValueError, match="another run is writing here"): train(str(pool), "tiny", str(tmp_path / "run"))

def test_a_checkpoint_without_its_list_of_files_is_passed_over(tmp_path):
    points = Checkpoints(tmp_path, keep=2)
    points.save(1, dict(n=1)); points.save(2, dict(n=2))
    manifest = points.folder(2) / "checkpoint.json"; head = json.loads(manifest.read_text()); del head["files"]; manifest.write_text(json.dumps(head))
    with pytest.warns(UserWarning, match="not as written"): assert points.latest().state["n"] == 1

def test_what_a_kill_left_half_removed_goes_with_the_next_checkpoint(tmp_path):
    points = Checkpoints(tmp_path, keep=2)
    points.save(1, {}); (points.folder(1) / "checkpoint.json").unlink()
    for step in (2, 3): points.save(step, {})
    assert points.steps() == [2, 3] and not points.folder(1).exists()

def test_the_commands_say_what_is_wrong(tmp_path, pool, capsys):
    file = tmp_path / "a file"; file.write_text("")
    refused(capsys, "verigen", "--applications", "minidesk", "--count", 1, "--out", file, naming=file)
    refused(capsys, "verigen", "--applications", "", "--out", tmp_path / "v", naming="applications")
    refused(capsys, "train", "--pool", pool, "--model", "tiny", "--out", file, naming=file)
    refused(capsys, "train", "--pool", pool, "--model", "tiny", "--iterations", -1, "--out", tmp_path / "t", naming="iterations")
    refused(capsys, "demo", "--out", file, naming=file)
    empty = TaskPool(tmp_path / "empty", create=True); (empty.path / "catalog.jsonl").write_text("")
    refused(capsys, "train", "--pool", empty.path, "--out", tmp_path / "t", naming=empty.path)
    assert not (tmp_path / "v").exists() and not (tmp_path / "t").exists()

def test_a_disk_that_fills_up_under_the_weights_is_named(tmp_path):
    def fill(folder): raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    points = Checkpoints(tmp_path); points.save(1, {})
    with pytest.raises(CheckpointError, match="no space left on the disk.*step 1, is intact"): points.save(2, {}, dict(trainer=fill))
    with pytest.raises(OSError, match="no space left") as error, atomic_folder(tmp_path / "policy") as work: fill(work)
    assert error.value.errno == errno.ENOSPC and not (tmp_path / "policy").exists() and points.steps() == [1]
