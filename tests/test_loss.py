"""Advantages, Eq. 3 and batches: hand-computed cases, and what must hold however a batch is cut."""
from math import exp, log

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from scalecua_nb.context.stream import Image, Stream, Text
from scalecua_nb.context.window import count_segments, stepwise, whole, window
from scalecua_nb.core.records import Episode, Observation, Verdict
from scalecua_nb.core.settings import LossSettings
from scalecua_nb.rl.advantage import grade, group_advantages
from scalecua_nb.rl.batch import Batch, BatchError, Counts, batch_from_bytes, batch_to_bytes, item_weight, pad
from scalecua_nb.rl.loss import kl_k3, policy_loss, surrogate

NORMALISERS = ("batch_token_mean", "rollout_mean", "sum")
OFF = LossSettings(kl=0.0)


class Words:
    image_id, vision_start, vision_end = 0, 1, 2

    def encode(self, text): return [3 + len(w) for w in text.split()]
    def decode(self, ids): return " ".join("w" * (i - 3) for i in ids)
    def image(self, observation): return 4, (1, 4, 4)


def play(group, j, replies, score=1.0, policy=window(2, 2), end="done", status="scored"):
    "One judged rollout through a real stream; `replies` are the lengths of its replies."
    name = f"{group}-{j}"
    screens = [Observation(np.full((4, 4, 3), [j, t, len(group)], np.uint8), t) for t in range(len(replies) + 1)]
    stream = Stream(Words(), policy, name, group, "task")
    stream.begin([Text("do this"), Image(screens[0])])
    for t, n in enumerate(replies, 1):
        stream.reply([9 + (t * k) % 7 for k in range(n)], [-0.1 * t - 0.01 * k for k in range(n)], [t] * n)
        stream.observe([Text("now"), Image(screens[t])], lambda t: [Text("seen")])
    return Episode("task", name, group, observations=screens, segments=stream.finish(), verdict=Verdict(score, status), end=end)


def loss_of(parts, counts, normaliser, loss_settings=LossSettings(kl=0.05)):
    "The loss of a made-up policy whose log-probabilities depend on token, turn and nothing else, and their gradient by one parameter."
    theta, total = torch.tensor(0.6, requires_grad=True), 0.0
    for items in parts:
        p = pad(items, counts, normaliser)
        now = p.logp + theta * torch.sin(p.ids * 1.7 + p.version)
        total = total + policy_loss(now, p.logp, p.advantage, p.weight, p.mask, loss_settings, ref_logp=p.logp + 0.4 * torch.cos(p.ids + p.version))[0]
    total.backward()
    return total.item(), theta.grad.item()


# --- Eq. 3 by hand ---------------------------------------------------------------------------------

@pytest.mark.parametrize("advantage, ratio, expected, slope", [
    (2.0, 0.5, 1.0, 2.0),        # raised token that has become rarer: full ratio
    (2.0, 1.0, 2.0, 2.0),
    (2.0, 1.27, 2.54, 2.0),
    (2.0, 1.5, 2.56, 0.0),       # raised enough: clipped at 1 + 0.28
    (2.0, 50.0, 2.56, 0.0),
    (-2.0, 0.5, -1.6, 0.0),      # lowered enough: clipped at 1 - 0.2
    (-2.0, 0.81, -1.62, -2.0),
    (-2.0, 1.5, -3.0, -2.0),     # a token to be lowered that has been raised: full blame …
    (-2.0, 2.9, -5.8, -2.0),
    (-2.0, 4.0, -6.0, 0.0),      # … down to c times the advantage
    (0.0, 4.0, 0.0, 0.0)])
def test_surrogate_by_sign_of_the_advantage(advantage, ratio, expected, slope):
    rho = torch.tensor(ratio, requires_grad=True)
    value = surrogate(rho, torch.tensor(advantage))
    value.backward()
    assert value.item() == pytest.approx(expected) and rho.grad.item() == pytest.approx(slope)


def test_loss_of_one_token_with_kl_and_entropy():
    # now 1/2, sampled at 0.4, reference 1/4: ratio 1.25, k3 = 1/2 - 1 + log 2
    s = LossSettings(kl=0.1, entropy=0.01)
    loss, stats = policy_loss(torch.tensor([log(0.5)]), torch.tensor([log(0.4)]), torch.tensor(1.0), torch.tensor(0.5), torch.ones(1), s,
                              ref_logp=torch.tensor([log(0.25)]), entropy=torch.tensor([0.7]))
    assert loss.item() == pytest.approx(-0.5 * (1.25 - 0.1 * (0.5 - 1 + log(2)) + 0.01 * 0.7))
    m = stats.metrics()
    assert m["kl"] == pytest.approx(-0.5 + log(2)) and m["entropy"] == pytest.approx(0.7) and m["rollout_kl"] == pytest.approx(1.25 - 1 - log(1.25))


def test_missing_reference_or_entropy_is_refused():
    zero, one = torch.zeros(1), torch.ones(1)
    with pytest.raises(ValueError, match="loss.kl is 0.0001 but ref_logp"): policy_loss(zero, zero, one, one, one, LossSettings())
    with pytest.raises(ValueError, match="loss.entropy is 0.1 but entropy"): policy_loss(zero, zero, one, one, one, LossSettings(kl=0, entropy=0.1))


@given(st.lists(st.floats(0.02, 1), min_size=2, max_size=6), st.lists(st.floats(0.02, 1), min_size=6, max_size=6))
def test_k3_is_an_unbiased_estimate_that_is_never_negative(p, q):
    p, q = (torch.tensor(x[:len(p)], dtype=torch.float64) for x in (p, q))
    p, q = (p / p.sum()).log(), (q / q.sum()).log()
    k3 = kl_k3(p, q, torch.ones(len(p)))
    assert (k3 >= -1e-12).all() and (p.exp() * k3).sum().item() == pytest.approx((p.exp() * (p - q)).sum().item(), abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(st.floats(-30, 30), st.floats(-3, 3), st.floats(0.05, 0.5), st.floats(0.05, 1), st.floats(1.1, 5))
def test_surrogate_is_bounded_and_never_above_the_unclipped_objective(x, advantage, low, high, cap):
    s = LossSettings(clip_low=low, clip_high=high, clip_cap=cap)
    ratio, a = torch.tensor(exp(x), dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64)
    value = surrogate(ratio, a, s).item()
    assert abs(value) <= max(1 + high, cap) * abs(advantage) + 1e-9
    if not (advantage < 0 and exp(x) > cap): assert value <= exp(x) * advantage + 1e-9


# --- groups ----------------------------------------------------------------------------------------

def test_group_statistics_are_over_rollouts_not_segments():
    long, short = play("g", 0, [2] * 20, 1.0), play("g", 1, [2], 0.0)
    grades = grade([long, short])
    assert len(long.segments) > 5 and len(short.segments) == 1
    assert [grades.rollouts[e.rollout_id].advantage for e in (long, short)] == pytest.approx([0.5 ** 0.5, -(0.5 ** 0.5)], rel=1e-5)
    items = Batch.from_episodes([long, short], grades).items
    assert len({i.advantage for i in items if i.segment.rollout_id == "g-0"}) == 1, "all segments of a rollout share its advantage"


def test_failures_with_some_penalised_have_signal_only_where_the_setting_says_so():
    group = [play("g", j, [2] * 3, 0.0, end=end) for j, end in enumerate(["done", "turn_limit", "length", "fail"])]
    by_rule = {rule: grade(group, LossSettings(zero_signal=rule)) for rule in ("outcome", "reward", "none")}
    assert [g.reward for g in by_rule["outcome"].rollouts.values()] == [0, -0.2, -0.2, 0]
    assert (by_rule["outcome"].informative, by_rule["reward"].informative, by_rule["none"].informative) == (0, 1, 1)
    assert len(Batch.from_episodes(group, by_rule["outcome"])) == 0 and len(Batch.from_episodes(group, by_rule["none"])) == 4
    assert [np.sign(g.advantage) for g in by_rule["none"].rollouts.values()] == [1, -1, -1, 1]


def test_equal_rewards_of_unequal_outcomes_are_kept_by_outcome_only():
    group = [play("g", 0, [2], 0.2, end="turn_limit"), play("g", 1, [2], 0.0)]     # 0.2 - 0.2 = 0
    assert [grade(group, LossSettings(zero_signal=r)).rollouts["g-0"].trained for r in ("outcome", "reward", "none")] == [True, False, True]


def test_blocked_rollouts_are_in_no_statistic_and_no_batch():
    group = [play("g", 0, [2], 1.0), play("g", 1, [2], 0.0), play("g", 2, [2], 0.0, status="blocked"), play("g", 3, [2], 0.0, end="blocked")]
    grades = grade(group)
    assert [g.advantage for g in grades.rollouts.values()][:2] == pytest.approx(list(group_advantages([1, 0])))
    assert {i.segment.rollout_id for i in Batch.from_episodes(group, grades).items} == {"g-0", "g-1"}
    assert grades.metrics()["blocked"] == 0.5 and grades.metrics()["score"] == 0.5
    everything = grade([play("g", j, [2], 0.0, status="blocked") for j in range(3)])
    assert everything.groups == 0 and np.isnan(everything.metrics()["informative"])


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.booleans())
def test_advantages_are_centred_and_scaled(rewards, std):
    a = group_advantages(rewards, std)
    assert abs(a.sum()) < 1e-6 and np.isfinite(a).all()
    if std and np.std(rewards, ddof=1 if len(rewards) > 1 else 0) > 1e-3: assert a.std(ddof=1) == pytest.approx(1, abs=2e-3)


# --- batches ---------------------------------------------------------------------------------------

lengths = st.lists(st.integers(1, 5), min_size=1, max_size=14)
policies = st.sampled_from([window(1, 1), window(2, 2), window(3, 2, "reaches"), stepwise(), whole()])


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=6), policies, st.sampled_from(NORMALISERS), st.integers(1, 300), st.booleans(), st.integers(1, 4))
def test_loss_and_gradient_do_not_depend_on_micro_batches_or_workers(rollouts, policy, normaliser, tokens, same_layout, workers):
    episodes = [play("g", j, r, float(j % 2), policy) for j, r in enumerate(rollouts)]
    batch = Batch.from_episodes(episodes, grade(episodes))
    expected = loss_of([batch.items], batch.counts, normaliser)
    assert loss_of(batch.micro_batches(tokens, same_layout), batch.counts, normaliser) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    shards = [batch.shard(rank, workers) for rank in range(workers)]
    assert sum(len(s) for s in shards) == len(batch)
    parts = [part for s in shards for part in s.micro_batches(tokens, same_layout)]
    assert loss_of(parts, batch.counts, normaliser) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=5), st.sampled_from(NORMALISERS))
def test_loss_does_not_depend_on_how_rollouts_are_cut_into_segments(rollouts, normaliser):
    losses = []
    for policy in (window(1, 1), window(2, 2), stepwise(), whole()):      # this made-up policy does not look at the context, so only the cut differs
        episodes = [play("g", j, r, float(j % 2), policy) for j, r in enumerate(rollouts)]
        batch = Batch.from_episodes(episodes, grade(episodes))
        assert batch.counts == Counts(sum(map(sum, rollouts)), len(rollouts))
        losses.append(loss_of([batch.items], batch.counts, normaliser))
    for other in losses[1:]: assert other == pytest.approx(losses[0], rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("turns, segments", [(1, 1), (5, 1), (10, 1), (11, 2), (15, 2), (16, 3)])
def test_rollouts_of_one_turn_of_exactly_k_plus_delta_screenshots_and_of_one_more(turns, segments):
    a, b = play("g", 0, [3] * turns, 1.0, window(5, 5)), play("g", 1, [3] * turns, 0.0, window(5, 5))
    assert len(a.segments) == segments == count_segments(window(5, 5), turns)
    batch = Batch.from_episodes([a, b], grade([a, b]))
    assert batch.counts == Counts(6 * turns, 2) and len(batch) == 2 * segments
    assert sum(item_weight(i, batch.counts, "rollout_mean") * i.segment.mask.sum() for i in batch.items) == pytest.approx(1)


def test_dealt_steps_are_whole_rollouts_with_counts_of_their_own():
    episodes = [play("g", j, [2] * (j + 1), float(j % 2)) for j in range(7)]
    batch = Batch.from_episodes(episodes, grade(episodes))
    dealt = batch.deal(3, seed=1)
    homes = [{i.segment.rollout_id for i in d.items} for d in dealt]
    assert sum(map(len, homes)) == 7 and len(set.union(*homes)) == 7
    assert sum(d.counts.tokens for d in dealt) == batch.counts.tokens
    assert [i.segment.rollout_id for d in batch.deal(3, seed=1) for i in d.items] == [i.segment.rollout_id for d in dealt for i in d.items]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_read_as_a_consistent_batch(data):
    episodes = [play("g", j, [2, 1], float(j)) for j in range(2)]
    raw = bytearray(batch_to_bytes(Batch.from_episodes(episodes, grade(episodes))))
    for _ in range(data.draw(st.integers(1, 3))): raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    raw = bytes(raw[:data.draw(st.integers(0, len(raw)))]) if data.draw(st.booleans()) else bytes(raw)
    try: batch = batch_from_bytes(raw)
    except BatchError as e: assert "\n" not in str(e)
    else: pad(batch.items, batch.counts)


@settings(max_examples=30, deadline=None)
@given(st.lists(lengths, min_size=2, max_size=4), policies)
def test_batches_survive_the_wire(rollouts, policy):
    episodes = [play("g", j, r, float(j % 2), policy) for j, r in enumerate(rollouts)]
    batch = Batch.from_episodes(episodes, grade(episodes)); back = batch_from_bytes(batch_to_bytes(batch))
    assert back.counts == batch.counts and loss_of([back.items], back.counts, "rollout_mean") == loss_of([batch.items], batch.counts, "rollout_mean")
    assert all((back.images[k] == v).all() for k, v in batch.images.items()) and back.images.keys() == batch.images.keys()
    assert [i.segment.images for i in back.items] == [i.segment.images for i in batch.items]
