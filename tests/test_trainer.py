"""The in-process trainer on real rollouts: the engine's log-probs, a loss that does not care how it is cut, caches, refusals."""
import asyncio
import copy

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText

from scalecua_nb.context.stream import Image, Stream, Text
from scalecua_nb.context.window import stepwise, whole, window
from scalecua_nb.core.records import Episode, Observation, Verdict
from scalecua_nb.core.settings import LossSettings, RLSettings, TrainerSettings
from scalecua_nb.engine.base import Sampling
from scalecua_nb.engine.model import VisionLanguage
from scalecua_nb.engine.tiny_model import BANNED, EOS, IMAGE_PAD, VISION_END, VISION_START, build_tiny_model, image_grid
from scalecua_nb.engine.torch import TorchEngine
from scalecua_nb.engine.vision import FeatureCache, image_features
from scalecua_nb.rl.advantage import grade
from scalecua_nb.rl.batch import Batch
from scalecua_nb.rl.logprobs import segment_logprobs
from scalecua_nb.rl.torch_trainer import TorchTrainer
from scalecua_nb.rl.trainer import TrainerError

torch.set_num_threads(1)
RL = RLSettings(learning_rate=1e-3, temperature=0.8)


class Words:
    image_id, vision_start, vision_end = IMAGE_PAD, VISION_START, VISION_END
    def encode(self, text): return [20 + sum(map(ord, w)) % 100 for w in text.split()]
    def decode(self, ids): return " ".join(map(str, ids))
    def image(self, observation): return image_grid(observation.image.shape[1::-1])


async def play(engine, group, j, turns, policy, temperature=0.8):
    "A rollout whose group shares its first screen; the score is drawn."
    first, rng = np.random.default_rng(group), np.random.default_rng([group, j])
    name = f"{group}-{j}"
    screens = [Observation((first if t == 0 else rng).integers(0, 256, (64, 96, 3), np.uint8), t) for t in range(turns + 1)]
    stream = Stream(Words(), policy, name, f"{group}", "task")
    stream.begin([Text("do this"), Image(screens[0])])
    for t in range(1, turns + 1):
        ids, shown = stream.prompt()
        g = await engine.generate(name, ids, shown, Sampling(max_tokens=4, temperature=temperature, stop_ids=(EOS,), banned_ids=BANNED, seed=int(rng.integers(2**62))))
        stream.reply(g.ids, g.logprobs, g.versions)
        stream.observe([Text("now"), Image(screens[t])], lambda i: [Text("seen")])
    await engine.release(name)
    return Episode("task", name, f"{group}", observations=screens, segments=stream.finish(), verdict=Verdict(float(rng.random() < 0.5)), end="done")


async def collect(engine, policy=window(2, 2), groups=4, n=6, turns=6, temperature=0.8):
    episodes = await asyncio.gather(*[play(engine, k, j, 1 + (k + j) % turns, policy, temperature) for k in range(groups) for j in range(n)])
    return Batch.from_episodes(episodes, grade(episodes))


def trainer(seed=0, tokens=16_384, kl=0.0, entropy=0.0, rl=RL, **kwargs):
    return TorchTrainer(build_tiny_model(seed=seed), rl, LossSettings(kl=kl, entropy=entropy), TrainerSettings(micro_batch_tokens=tokens), **kwargs)


def flat(t): return torch.cat([p.detach().flatten() for p in t.model.parameters()])


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("policy", [window(2, 2), stepwise(1), whole()])
async def test_the_ratio_of_fresh_rollouts_is_1_also_after_an_update(policy, temperature):
    t = trainer(rl=RLSettings(learning_rate=1e-2, temperature=temperature))
    engine = TorchEngine(copy.deepcopy(t.model))
    for version in (1, 2):
        batch = await collect(engine, policy, temperature=temperature)
        metrics = t.step(batch)
        assert metrics["log_ratio_max"] < 1e-5 and metrics["ratio_mean"] == pytest.approx(1, abs=1e-6)
        assert metrics["tokens"] == batch.counts.tokens
        await t.publish(engine, version)
    stale = t.step(batch)
    assert stale["log_ratio_max"] > 1e-2          # rollouts of the version before are off-policy


async def test_the_loss_and_the_step_do_not_depend_on_micro_batches():
    batch = await collect(TorchEngine(build_tiny_model()))
    results = []
    for tokens in (1, 300, 3_000, 100_000):
        t = trainer(tokens=tokens, kl=0.05, entropy=0.01)
        with torch.no_grad():
            for p in t.parameters.values(): p.add_(0.01 * torch.sign(p))      # away from the reference and from the sampling policy
        results.append((t.step(batch), flat(t)))
    assert len({m["micro_batches"] for m, _ in results}) >= 3 and results[0][0]["kl"] > 0
    for metrics, weights in results[1:]:
        for name in ("loss", "grad_norm", "kl", "entropy", "ratio_std"): assert metrics[name] == pytest.approx(results[0][0][name], rel=1e-4, abs=1e-6), name
        torch.testing.assert_close(weights, results[0][1], atol=1e-5, rtol=1e-4)


async def test_stock_forwards_give_the_same_step():
    batch = await collect(TorchEngine(build_tiny_model()))
    a, b = trainer(), trainer()
    b.vlm.stock = True
    x, y = a.step(batch), b.step(batch)
    assert x["grad_norm"] == pytest.approx(y["grad_norm"], rel=1e-4) and x["loss"] == pytest.approx(y["loss"], abs=1e-6)
    torch.testing.assert_close(flat(a), flat(b), atol=1e-5, rtol=1e-4)


async def test_the_gradient_is_the_stock_models():
    "Eq. 3 at ratio 1 is the policy gradient: sum of advantage times the gradient of the log-prob, here by the model's own forward, one segment at a time."
    batch = await collect(TorchEngine(build_tiny_model()), groups=2, n=4)
    model = build_tiny_model()
    loss = 0.0
    for item in batch.items:
        s = item.segment; ids = torch.tensor(s.ids[None].astype(np.int64))
        features = dict(zip((i.sha256 for i in s.images), image_features(model, [batch.images[i.sha256] for i in s.images], stock=True)))
        positions = model.model.get_rope_index(ids, (ids == IMAGE_PAD).int(), image_grid_thw=torch.tensor([i.thw for i in s.images]))[0]
        x = model.get_input_embeddings()(ids).masked_scatter((ids == IMAGE_PAD)[..., None], torch.cat([features[i.sha256][0] for i in s.images]).detach())
        logits = model.lm_head(model.model.language_model(inputs_embeds=x, position_ids=positions, use_cache=False).last_hidden_state)[0, :-1] / 0.8
        logits[:, list(BANNED)] = -torch.inf
        logp = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        loss = loss - item.advantage * (logp * torch.tensor(s.mask[1:])).sum() / batch.counts.tokens
    loss.backward()
    norm = torch.sqrt(sum(p.grad.square().sum() for n, p in model.named_parameters() if ".visual." not in n))
    assert trainer().step(batch)["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)


async def test_each_screen_goes_through_the_vision_tower_once():
    model = build_tiny_model()
    engine = TorchEngine(copy.deepcopy(model))
    t = TorchTrainer(model, RL, LossSettings(kl=0.01), TrainerSettings(micro_batch_tokens=500), features=engine.vlm.cache)
    batch = await collect(engine)
    seen = engine.vlm.cache.computed
    assert seen == len({sha for sha in engine.vlm.cache._held})
    for version in (1, 2): t.step(batch); await t.publish(engine, version)
    assert engine.vlm.cache.computed == seen and t.reference.cache is engine.vlm.cache      # not again for the step, the reference, or the next version
    with pytest.raises(ValueError, match="frozen"): TorchTrainer(model, freeze_vision=False, features=engine.vlm.cache)


async def test_the_reference_stays_and_the_penalty_grows():
    t = trainer(kl=0.1)
    engine = TorchEngine(copy.deepcopy(t.model))
    start = copy.deepcopy(t.reference.model.state_dict())
    batch = await collect(engine)
    kl = [t.step(batch)["kl"] for _ in range(4)]
    assert kl[0] == pytest.approx(0, abs=1e-7) and kl[1] > 1e-6 and kl[3] > kl[1]
    assert all(torch.equal(w, start[n]) for n, w in t.reference.model.state_dict().items())


async def test_learning_rate_0_leaves_logprobs_unmoved():
    t = trainer(kl=0.1)
    batch = await collect(TorchEngine(copy.deepcopy(t.model)))
    before = segment_logprobs(t.vlm, batch.items, batch.images, 0.8, BANNED)
    t.learning_rate = 0.0
    for _ in range(3): t.step(batch)
    for a, b in zip(before, segment_logprobs(t.vlm, batch.items, batch.images, 0.8, BANNED)): np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("what", ["weights", "advantage"])
async def test_a_step_that_is_not_finite_is_not_taken(what):
    t = trainer()
    batch = await collect(TorchEngine(copy.deepcopy(t.model)))
    t.step(batch)
    if what == "weights":
        with torch.no_grad(): t.model.lm_head.weight[50, 0] = float("inf")
    else: batch.items[0].advantage = float("nan")
    before, optimizer = flat(t), copy.deepcopy(t.optimizer.state_dict()["state"])
    with pytest.raises(TrainerError, match="update 2: the loss is .* the step was not taken"): t.step(batch)
    assert torch.equal(before.nan_to_num(7), flat(t).nan_to_num(7)) and t.updates == 1
    for a, b in zip(optimizer.values(), t.optimizer.state_dict()["state"].values()):
        assert all(torch.equal(a[k], b[k]) for k in a)


async def test_a_policy_trained_on_its_own_choice_makes_it_likelier():
    t = trainer()
    batch = await collect(TorchEngine(copy.deepcopy(t.model)))
    def mean(sign): return np.mean([lp[i.segment.mask.astype(bool)].mean() for lp, i in zip(segment_logprobs(t.vlm, batch.items, batch.images, 0.8, BANNED), batch.items) if i.advantage * sign > 0])
    up, down = mean(1), mean(-1)
    for _ in range(5): t.step(batch)
    assert mean(1) > up and mean(-1) < down


async def test_saved_and_loaded_it_goes_on_to_the_same_numbers(tmp_path):
    a = trainer(kl=0.05)
    batch = await collect(TorchEngine(copy.deepcopy(a.model)))
    a.step(batch); a.learning_rate = 5e-4
    a.save(tmp_path / "t"); a.save(tmp_path / "t")                       # replaced whole
    b = trainer(seed=3, kl=0.05)
    b.load(tmp_path / "t")
    assert (b.updates, b.learning_rate) == (1, 5e-4)
    for _ in range(3): assert a.step(batch)["loss"] == b.step(batch)["loss"]
    assert torch.equal(flat(a), flat(b))
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".bin", ".pt", ".pkl", ".pth")]


async def test_the_saved_folder_is_a_model_of_transformers(tmp_path):
    t = trainer()
    batch = await collect(TorchEngine(copy.deepcopy(t.model)))
    t.step(batch); t.save(tmp_path / "t")
    loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / "t").eval()
    for a, b in zip(*(segment_logprobs(VisionLanguage(m), batch.items, batch.images, 0.8, BANNED) for m in (loaded, t.model))): np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("harm, message", [
    (lambda d: (d / "trainer.json").unlink(), "not the folder of a saved trainer"),
    (lambda d: (d / "model.safetensors").write_bytes(b"0" * 50), "model.safetensors: not a readable safetensors file"),
    (lambda d: save_file({n: w for n, w in load_file(d / "model.safetensors").items() if "norm" not in n}, d / "model.safetensors"), "lack 'model.*belong to another model"),
    (lambda d: save_file({"exp_avg.other": torch.zeros(2)}, d / "optimizer.safetensors"), "optimizer.safetensors: 'exp_avg.other' does not fit"),
    (lambda d: (d / "reference.safetensors").unlink(), "reference.safetensors"),
])
async def test_a_folder_that_does_not_fit_changes_nothing(tmp_path, harm, message):
    a, b = trainer(kl=0.05), trainer(seed=3, kl=0.05)
    batch = await collect(TorchEngine(copy.deepcopy(a.model)), groups=1, n=8)
    a.step(batch); b.step(batch)
    a.save(tmp_path / "t"); harm(tmp_path / "t")
    before = flat(b)
    with pytest.raises(TrainerError, match=message): b.load(tmp_path / "t")
    assert torch.equal(before, flat(b)) and b.updates == 1 and b.step(batch)["loss"] is not None


async def test_data_parallel_shares_add_up():
    "Gradients of two shares, added, are those of the whole: counts stay the batch's."
    batch = await collect(TorchEngine(build_tiny_model()))
    grads = []
    for part in (batch, batch.shard(0, 2), batch.shard(1, 2)):
        t = trainer()
        t._descend = lambda loss: {}
        t.step(part)
        grads.append(torch.cat([p.grad.flatten() for p in t.parameters.values()]))
    torch.testing.assert_close(grads[1] + grads[2], grads[0], atol=1e-6, rtol=1e-4)


async def test_bfloat16_stays_close():
    a, b = trainer(), TorchTrainer(build_tiny_model().to(torch.bfloat16), RL, LossSettings(kl=0.0))
    batch = await collect(TorchEngine(copy.deepcopy(a.model)), groups=2)
    x, y = a.step(batch), b.step(batch)
    assert y["log_ratio_max"] < 0.5 and y["grad_norm"] == pytest.approx(x["grad_norm"], rel=0.2)


def test_the_feature_cache_is_shared_by_identity():
    cache = FeatureCache(lambda images: [])
    assert VisionLanguage(build_tiny_model(), features=cache).cache is cache      # also while it is empty
