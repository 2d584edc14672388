"Samplers, whatever their kind: what a training loop may rely on."

import json

import numpy as np
import pytest

from scalecua_nb.core.settings import SamplerSettings
from scalecua_nb.sampling.base import Outcome
from scalecua_nb.sampling.baselines import SAMPLERS, make_sampler
from scalecua_nb.sampling.frontier import FrontierSampler, frontier_weight

KINDS = sorted(SAMPLERS)


def rates(size, seed=0):
    rng = np.random.default_rng(seed)
    return {f"t{i}": None if rng.random() < 0.1 else float(rng.binomial(8, rng.random()) / 8) for i in range(size)}


def make(kind, seed=0, **settings):
    return make_sampler(SamplerSettings(kind=kind, **settings), seed, total_draws=400)


def play(sampler, steps, rng, inflight=()):
    "What a loop with stragglers does: draw, keep some in flight, report others, add tasks now and then."
    drawn, inflight = [], list(inflight)
    for step in steps:
        batch = [d.task_id for d in sampler.draw(6, exclude=inflight)]
        assert len(set(batch)) == 6 and not set(batch) & set(inflight)
        drawn.append(batch)
        inflight = (inflight + batch)[-10:]
        done = inflight[:4]
        sampler.update([Outcome(t, rng.integers(0, 2, int(rng.integers(0, 9))), blocked=int(rng.integers(0, 3))) for t in done])
        inflight = inflight[4:]
        if step % 5 == 4:
            sampler.extend({f"new{step}-{i}": None if i else 0.5 for i in range(3)})
    return drawn, inflight


@pytest.mark.parametrize("kind", KINDS)
def test_same_seed_same_draws_and_another_seed_others(kind):
    runs = []
    for seed in (1, 1, 2):
        sampler = make(kind, seed)
        sampler.start(rates(80))
        runs.append(play(sampler, range(20), np.random.default_rng(5))[0])
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [1, 7, 15])
def test_resumed_anywhere_it_draws_on_alike(kind, cut):
    whole, part, resumed = make(kind, 3), make(kind, 3), make(kind, 44)
    for sampler in (whole, part):
        sampler.start(rates(80))
    rng = np.random.default_rng(9)
    _, inflight = play(whole, range(cut), rng)
    rest, _ = play(whole, range(cut, 20), rng, inflight)
    rng = np.random.default_rng(9)
    _, inflight = play(part, range(cut), rng)
    resumed.load_state_dict(json.loads(json.dumps(part.state_dict(), allow_nan=False)))
    assert play(resumed, range(cut, 20), rng, inflight)[0] == rest
    assert resumed.pass_rates() == whole.pass_rates()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_as_large_as_the_pool_is_the_pool(kind):
    sampler = make(kind)
    sampler.start({f"t{i}": (i + 1) / 20 for i in range(20)})
    assert {d.task_id for d in sampler.draw(20)} == set(sampler.ids)
    busy = sampler.ids[:5]
    assert {d.task_id for d in sampler.draw(sampler.available(busy), exclude=busy)} == set(sampler.ids[5:])
    with pytest.raises(ValueError, match=r"21 tasks were asked for but 20 are free \(20 in the pool, 0 in flight\)"):
        sampler.draw(21)


@pytest.mark.parametrize("kind", KINDS)
def test_blocked_rollouts_never_move_a_rate(kind):
    sampler = make(kind)
    sampler.start({"a": 0.5, "b": None, "c": 0.25})
    before = sampler.pass_rates()
    sampler.update([Outcome("a", (), blocked=8), Outcome("b", (), blocked=8)])
    assert sampler.pass_rates() == before
    sampler.update([Outcome("a", (1, 1), blocked=6), Outcome("b", (0, 1), blocked=6)])
    assert sampler.pass_rates() == {"a": pytest.approx(0.6), "b": 0.5, "c": 0.25}


@pytest.mark.parametrize("kind", KINDS)
def test_the_filter_applies_to_probed_tasks_only(kind):
    sampler = make(kind, p_min=0.1, p_max=0.9)
    sampler.start({"never": 0.0, "always": 1.0, "edge": 0.1, "apt": 0.5, "unprobed": None})
    assert sampler.ids == ["edge", "apt", "unprobed"]
    sampler.extend({"later": 0.95, "also": None})
    assert sampler.ids == ["edge", "apt", "unprobed", "also"]


def test_frontier_draws_the_top_of_equation_2():
    "Against a literal ranking by weight, with tasks in flight."
    rng = np.random.default_rng(0)
    for trial in range(30):
        sampler = FrontierSampler(trial, uniform_share=0.25)
        sampler.start({f"t{i}": float(p) for i, p in enumerate(rng.random(120))})
        busy = [f"t{i}" for i in rng.choice(120, 15, replace=False)]
        free = [t for t in sampler.ids if t not in busy]
        ranked = sorted(free, key=lambda t: -frontier_weight(sampler.pass_rates()[t]))
        batch = sampler.draw(8, exclude=busy)
        strata = [d.stratum for d in batch]
        assert strata == ["frontier"] * 6 + ["uniform"] * 2
        assert all(d.task_id in ranked[:24] for d in batch[:6]) and all(d.task_id in ranked[24:] for d in batch[6:])


def test_frontier_draws_in_proportion_to_the_weights():
    "One draw of one task: probabilities are the weights of the pool, normalised."
    p = np.array([0.5, 0.7, 0.9])
    sampler = FrontierSampler(0, uniform_share=0.0, pool_factor=3)
    sampler.start({f"t{i}": float(v) for i, v in enumerate(p)})
    seen = np.bincount([int(sampler.draw(1)[0].task_id[1:]) for _ in range(6000)], minlength=3) / 6000
    np.testing.assert_allclose(seen, frontier_weight(p) / frontier_weight(p).sum(), atol=0.02)


def test_frontier_shuffles_ties():
    sampler = FrontierSampler(0)
    sampler.start({f"t{i}": 0.3 if i % 2 else 0.7 for i in range(400)})
    drawn = [d.task_id for _ in range(100) for d in sampler.draw(4) if d.stratum == "frontier"]
    odd = np.mean([int(t[1:]) % 2 for t in drawn])
    assert len(set(drawn)) > 150 and 0.4 < odd < 0.6  # 0.3 and 0.7 tie, although not in floating point


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_of_another_kind_is_refused_and_changes_nothing(kind):
    sampler, other = make(kind), make(KINDS[KINDS.index(kind) - 1])
    for one in (sampler, other):
        one.start(rates(40))
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="set sampler.kind to what the run was started with"):
        sampler.load_state_dict(other.state_dict())
    for damage in ({"rng": 3}, {"rate": [2.0] * len(sampler)}, {"ids": ["a"]}, {"known": "yes"}):
        with pytest.raises(ValueError, match="sampler state: "):
            sampler.load_state_dict({**before, **damage})
    assert sampler.state_dict() == before
