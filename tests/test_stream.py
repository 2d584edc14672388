"""The token-ID stream over random rollouts: what must hold whatever the policy, the pieces and the replies."""
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from scalecua_nb.context.stream import Ids, Image, Stream, Text
from scalecua_nb.context.window import count_segments, schedule, stepwise, whole, window
from scalecua_nb.core.records import Observation


class Characters:
    "One token a character; a screenshot of h rows has 2 + h image tokens. `encode` and `decode` are inverse, so every split is canonical."
    image_id, vision_start, vision_end = 1, 2, 3

    def encode(self, text): return [ord(c) for c in text]
    def decode(self, ids): return "".join(map(chr, ids))
    def image(self, observation): return 2 + len(observation.image), (1, len(observation.image), 1)


def screen(turn, rows=1):
    return Observation(np.full((rows, 2, 3), turn % 256, np.uint8), turn)


sizes = st.integers(1, 6)
policies = st.one_of(
    st.builds(window, sizes, sizes, st.sampled_from(["exceeds", "reaches"]), st.sampled_from(["splice", "retokenise"])),
    st.builds(stepwise, sizes), st.just(whole()))
words = st.text("abcdefgh \n<|>", max_size=8)
replies = st.lists(st.integers(97, 122), min_size=0, max_size=6)
turns = st.lists(st.tuples(replies, words, words, sizes), min_size=1, max_size=25)


def play(policy, turns, observe_last=True, **kw):
    "Run the turns through a stream, keeping every prompt that the policy was shown and every reply it gave."
    stream, seen = Stream(Characters(), policy, "r", "g", "t", **kw), []
    stream.begin([Text("task: "), Image(screen(0)), Text("go ")])
    for t, (reply, before, after, rows) in enumerate(turns, 1):
        prompt, images = stream.prompt()
        seen.append((prompt, images, reply))
        stream.reply(reply, [-t - i / 100 for i in range(len(reply))], [t // 3] * len(reply))
        if observe_last or t < len(turns):
            stream.observe([Text(before), Ids([120, 121]), Image(screen(t, rows)), Text(after)], lambda i: [Text(f"[{i}:"), Ids([122]), Text("]")])
    return stream, seen


@settings(max_examples=300, deadline=None)
@given(policies, turns, st.booleans())
def test_segments_are_what_the_policy_saw_and_train_each_reply_once(policy, turns, observe_last):
    stream, seen = play(policy, turns, observe_last)
    segments, codec = stream.finish(), Characters()
    trained = []
    for segment in segments:
        assert segment.mask.any() and segment.mask[-1], "a segment ends with a trained token"
        assert not segment.mask[0], "the first token is never trained: nothing predicts it"
        assert (segment.logp[segment.mask == 0] == 0).all() and (segment.version[segment.mask == 0] == -1).all()
        assert len({len(a) for a in segment.arrays().values()}) == 1
        # image spans and image tokens are the same set of places
        places = np.zeros(len(segment), bool)
        for span in segment.images:
            places[span.start:span.start + span.n_tokens] = True
            assert segment.ids[span.start - 1] == codec.vision_start and segment.ids[span.start + span.n_tokens] == codec.vision_end
        assert (places == (segment.ids == codec.image_id)).all()
        # in front of each reply stands, token for token, the prompt that the policy was shown
        for t in dict.fromkeys(segment.turn[segment.mask == 1]):
            own = np.flatnonzero((segment.turn == t) & (segment.mask == 1))
            prompt, images, reply = seen[t - 1]
            assert segment.ids[:own[0]].tolist() == prompt and segment.ids[own].tolist() == reply
            assert [s for s in segment.images if s.start < own[0]] == [s for s, _ in images]
            assert np.allclose(segment.logp[own], [-t - i / 100 for i in range(len(own))]) and (segment.version[own] == t // 3).all()
            trained.append(t)
    assert trained == [t for t, turn in enumerate(turns, 1) if turn[0]], "each reply once, in order"


@settings(max_examples=150, deadline=None)
@given(sizes, sizes, st.sampled_from(["exceeds", "reaches"]), turns)
def test_splicing_equals_retokenising_where_ids_are_canonical(keep, delta, trigger, turns):
    spliced, retokenised = ([(ids, [span for span, _ in images]) for ids, images, _ in play(window(keep, delta, trigger, refresh), turns)[1]]
                            for refresh in ("splice", "retokenise"))
    assert spliced == retokenised


@settings(max_examples=100, deadline=None)
@given(policies, st.integers(1, 60))
def test_visible_screenshots_follow_the_schedule(policy, n):
    stream, seen = play(policy, [([97], "", "", 1)] * n)
    assert len(stream.finish()) == count_segments(policy, n)
    for view, (_, images, _) in zip(schedule(policy, n), seen):
        assert [o.turn for _, o in images] == list(range(view.oldest, view.newest + 1))


@pytest.mark.parametrize("trigger, counts", [("exceeds", [49, 16, 9, 6, 4, 3]), ("reaches", [50, 16, 10, 6, 5, 3])])
@pytest.mark.parametrize("observe_last", [True, False])
def test_segment_counts_of_fifty_turns(trigger, counts, observe_last):
    turns = [([97], "", "", 1)] * 50
    assert [len(play(window(k, k, trigger), turns, observe_last)[0].finish()) for k in (1, 3, 5, 8, 10, 15)] == counts


@pytest.mark.parametrize("extra, segments", [(1 - 10, 1), (0, 1), (1, 2)])
def test_one_turn_exactly_k_plus_delta_screenshots_and_one_more(extra, segments):
    stream, seen = play(window(5, 5), [([97, 98], "x", "y", 1)] * (10 + extra))     # turn t is shown t screenshots until the first pruning
    assert len(stream.finish()) == segments
    assert len(seen[-1][1]) == (6 if extra == 1 else 10 + extra)


@settings(max_examples=60, deadline=None)
@given(policies, turns, st.integers(20, 120))
def test_no_segment_is_longer_than_max_length(policy, turns, max_length):
    stream = Stream(Characters(), policy, max_length=max_length)
    stream.begin([Text("task: "), Image(screen(0)), Text("go ")])
    for t, (reply, before, after, rows) in enumerate(turns, 1):
        if stream.full: break
        reply = reply[:stream.room]
        stream.reply(reply, [-1.0] * len(reply), [0] * len(reply))
        stream.observe([Text(before), Image(screen(t, rows)), Text(after)], lambda i: [Text("-")])
    assert all(len(s) <= max_length for s in stream.finish())


def test_prompts_are_snapshots():
    stream, seen = play(window(1, 1), [([97], "a", "b", 1)] * 4)
    lengths = [len(ids) for ids, _, _ in seen]
    stream.reply([98], [-1.0], [0])
    assert [len(ids) for ids, _, _ in seen] == lengths


def test_what_a_dropped_screenshot_leaves_is_no_screenshot():
    stream = Stream(Characters(), window(1, 1))
    stream.begin([Image(screen(0))])
    stream.observe([Image(screen(1))], lambda i: [])
    with pytest.raises(ValueError, match="not another screenshot"):
        stream.observe([Image(screen(2))], lambda i: [Image(screen(9))])
