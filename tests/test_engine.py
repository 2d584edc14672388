"""The in-process engine: its log-probs against the stock model's, its cache against none, its batches against single calls."""
import asyncio
import copy

import numpy as np
import pytest
import torch
from transformers import Glm4vConfig, Glm4vForConditionalGeneration, Qwen3VLForConditionalGeneration

from scalecua_nb.context.stream import Image, Stream, Text
from scalecua_nb.context.window import stepwise, whole, window
from scalecua_nb.core.records import ImageSpan, Observation
from scalecua_nb.engine.base import EngineError, Sampling
from scalecua_nb.engine.model import VisionLanguage, sampling_logprobs
from scalecua_nb.engine.tiny_model import (BANNED, BOS, EOS, IMAGE_PAD, VISION_END, VISION_START, build_tiny_model, image_grid, tiny_config,
                                           tiny_image_processor)
from scalecua_nb.engine.torch import TorchEngine
from scalecua_nb.engine.vision import image_features
from scalecua_nb.rl.batch import Item
from scalecua_nb.rl.logprobs import segment_logprobs

torch.set_num_threads(1)


class Words:
    "The tiny vocabulary: a word is an id from 20 on."
    image_id, vision_start, vision_end = IMAGE_PAD, VISION_START, VISION_END

    def encode(self, text): return [20 + sum(map(ord, w)) % 100 for w in text.split()]
    def decode(self, ids): return " ".join(map(str, ids))
    def image(self, observation): return image_grid(observation.image.shape[1::-1])


def screen(rng, size=(96, 64)): return Observation(rng.integers(0, 256, (size[1], size[0], 3), np.uint8))


async def play(engine, name, turns, policy, temperature=0.8, max_tokens=4, size=(96, 64), seed=0, forget=False):
    "A rollout of random screens through a real stream; returns its segments and screens by hash."
    rng = np.random.default_rng(seed)
    stream, images = Stream(Words(), policy, name, "group", "task"), {}
    def seen(obs, turn): obs.turn = turn; images[obs.sha256] = obs.image; return Image(obs)
    stream.begin([Text(" ".join(f"word{i}" for i in range(2 + seed % 6))), seen(screen(rng, size), 0)])
    for t in range(1, turns + 1):
        ids, shown = stream.prompt()
        if forget: await engine.release(name)
        g = await engine.generate(name, ids, shown, Sampling(max_tokens=max_tokens, temperature=temperature, stop_ids=(EOS,), banned_ids=BANNED, seed=1000 * seed + t))
        stream.reply(g.ids, g.logprobs, g.versions)
        stream.observe([Text(f"turn {t}"), seen(screen(rng, size), t)], lambda i: [Text(f"screen {i} dropped")])
    await engine.release(name)
    return stream.finish(), images


def stock_logprobs(model, segment, images, temperature, processor=None):
    "Log-probs of a segment by the model's own forward and the stock processor, one sequence at a time."
    ids = torch.tensor(segment.ids[None].astype(np.int64))
    model.model.rope_deltas = None
    pixels = tiny_image_processor()(images=[images[s.sha256] for s in segment.images], return_tensors="pt") if segment.images else {}
    with torch.no_grad(): logits = model(input_ids=ids, mm_token_type_ids=(ids == IMAGE_PAD).int(), **pixels).logits[0, :-1]
    logp = sampling_logprobs(logits, temperature, BANNED).gather(-1, ids[0, 1:, None])[:, 0].numpy()
    return np.where(segment.mask, np.concatenate([[0], logp]), 0)


@pytest.fixture(scope="module")
def model(): return build_tiny_model()


@pytest.fixture(scope="module")
def large():
    "Grouped key-value heads, three layers, deepstack features: what the tiny policy lacks and an 8B model has."
    config = tiny_config()
    config.text_config.num_key_value_heads, config.text_config.num_hidden_layers = 2, 3
    config.vision_config.depth, config.vision_config.deepstack_visual_indexes = 3, [0, 1]
    torch.manual_seed(0)
    return Qwen3VLForConditionalGeneration(config).eval()


POLICIES = {"window": window(2, 2), "reaches": window(1, 2, "reaches"), "retokenise": window(2, 1, refresh="retokenise"), "stepwise": stepwise(1), "whole": whole()}


@pytest.mark.parametrize("temperature", [0.8, 1.0])
@pytest.mark.parametrize("policy", POLICIES)
async def test_logprobs_are_the_stock_models_and_the_trainers_through_pruning(model, policy, temperature):
    engine = TorchEngine(model)
    played = await asyncio.gather(*[play(engine, f"r{i}", 3 + i % 5, POLICIES[policy], temperature, seed=i) for i in range(8)])
    segments = [s for segments, _ in played for s in segments]
    images = {sha: im for _, part in played for sha, im in part.items()}
    assert policy == "whole" or max(len(s) for s, _ in played) >= 2
    for s in segments: np.testing.assert_allclose(s.logp, stock_logprobs(model, s, images, temperature), atol=1e-5)
    again = segment_logprobs(VisionLanguage(model), [Item(s, 0.0, 0.0, 1) for s in segments], images, temperature, BANNED, tokens=500)
    for s, logp in zip(segments, again): np.testing.assert_allclose(s.logp, logp, atol=1e-5)


async def test_every_reply_token_is_in_one_segment(model):
    engine = TorchEngine(model)
    segments, _ = await play(engine, "r", 9, window(2, 2))
    assert sum(int(s.mask.sum()) for s in segments) == engine.stats["sampled"]


async def test_grouped_heads_deepstack_and_mixed_sizes(large):
    engine = TorchEngine(large)
    played = await asyncio.gather(*[play(engine, f"r{i}", 4, window(2, 2), size=((96, 64), (64, 32), (48, 80))[i % 3], seed=i) for i in range(6)])
    for segments, images in played:
        for s in segments: np.testing.assert_allclose(s.logp, stock_logprobs(large, s, images, 0.8), atol=1e-5)
    plain = VisionLanguage(large, stock=True)       # the same through the model's own forwards only
    for segments, images in played:
        for s, logp in zip(segments, segment_logprobs(plain, [Item(s, 0.0, 0.0, 1) for s in segments], images, 0.8, BANNED)):
            np.testing.assert_allclose(s.logp, logp, atol=1e-5)


async def test_a_cached_prefix_is_a_recomputed_one(model):
    cached, fresh = TorchEngine(model), TorchEngine(model)
    a, _ = await play(cached, "r", 8, window(3, 2), seed=3)
    b, _ = await play(fresh, "r", 8, window(3, 2), seed=3, forget=True)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x.ids, y.ids)
        np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)
    assert fresh.stats["reused"] == 0 and cached.stats["reused"] > cached.stats["computed"]


async def test_a_prompt_that_changes_anywhere_is_answered_as_if_new(model):
    rng = np.random.default_rng(0)
    engine = TorchEngine(model)
    screens = [screen(rng) for _ in range(3)]
    n, thw = image_grid((96, 64))
    for trial in range(30):
        ids, images = [BOS, *rng.integers(20, 100, 2)], []
        for k in rng.integers(0, 3, rng.integers(1, 4)):
            images.append((ImageSpan(screens[k].sha256, len(ids) + 1, n, thw), screens[k]))
            ids += [VISION_START] + [IMAGE_PAD] * n + [VISION_END, *rng.integers(20, 23, rng.integers(0, 3))]
        sampling = Sampling(max_tokens=3, banned_ids=BANNED, seed=trial)
        a = await engine.generate("same session", ids, images, sampling)
        b = await TorchEngine(model).generate("new", ids, images, sampling)
        assert a.ids == b.ids
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
    assert engine.stats["reused"] > 0


async def test_tokens_do_not_depend_on_the_batch(model):
    settings = [dict(temperature=0.5 + i % 3 / 2, max_tokens=1 + i % 6, seed=i, policy=(window(2, 2), stepwise(2))[i % 2], turns=2 + i % 5) for i in range(24)]
    crowd = TorchEngine(model, max_batch=7, max_sessions=9)      # calls queue, sessions are evicted
    together = await asyncio.gather(*[play(crowd, f"r{i}", **s) for i, s in enumerate(settings)])
    for i, s in enumerate(settings):
        alone = await play(TorchEngine(model), "alone", **s)
        for x, y in zip(together[i][0], alone[0], strict=True):
            np.testing.assert_array_equal(x.ids, y.ids)
            np.testing.assert_allclose(x.logp, y.logp, atol=1e-5)


async def test_a_worker_thread_changes_nothing(model):
    engine = TorchEngine(model, worker=True)
    threaded = await asyncio.gather(*[play(engine, f"r{i}", 3, window(2, 2), seed=i) for i in range(6)])
    for i, (segments, _) in enumerate(threaded):
        for x, y in zip(segments, (await play(TorchEngine(model), "r", 3, window(2, 2), seed=i))[0], strict=True):
            np.testing.assert_array_equal(x.ids, y.ids)
    await engine.close()


def prompt(rng):
    obs = screen(rng)
    n, thw = image_grid((96, 64))
    return [BOS, 20, VISION_START] + [IMAGE_PAD] * n + [VISION_END], [(ImageSpan(obs.sha256, 3, n, thw), obs)]


async def test_banned_ids_are_never_sampled(model):
    ids, images = prompt(np.random.default_rng(0))
    async def sampled(banned, temperature=50.0):
        engine = TorchEngine(model)
        replies = await asyncio.gather(*[engine.generate(str(i), ids, images, Sampling(max_tokens=20, temperature=temperature, banned_ids=banned, seed=i)) for i in range(60)])
        return {t for g in replies for t in g.ids}, [lp for g in replies for lp in g.logprobs]
    free, _ = await sampled(())
    bound, logps = await sampled(BANNED)
    assert free >= set(BANNED) and not bound & set(BANNED) and np.isfinite(logps).all()
    assert np.mean(logps) < np.log(1 / 100)          # near uniform over the 126 that are left


async def test_greedy_and_stop(model):
    ids, images = prompt(np.random.default_rng(1))
    engine = TorchEngine(model)
    g = await engine.generate("a", ids, images, Sampling(max_tokens=6, banned_ids=BANNED, greedy=True))
    assert g.finish == "length" and g.ids == (await engine.generate("b", ids, images, Sampling(max_tokens=6, banned_ids=BANNED, greedy=True, seed=9))).ids
    s = await engine.generate("c", ids, images, Sampling(max_tokens=6, banned_ids=BANNED, greedy=True, stop_ids=(g.ids[2],)))
    assert s.finish == "stop" and s.ids == g.ids[:g.ids.index(g.ids[2]) + 1]


async def test_unseeded_calls_differ_and_repeat_with_the_engine(model):
    ids, images = prompt(np.random.default_rng(1))
    async def some(seed):
        engine = TorchEngine(model, seed=seed)
        return [(await engine.generate(str(i), ids, images, Sampling(max_tokens=8, banned_ids=BANNED, temperature=2.0))).ids for i in range(4)]
    assert await some(0) == await some(0) != await some(1)
    assert len({tuple(x) for x in await some(0)}) == 4


async def test_caches_are_void_after_an_update(model):
    engine = TorchEngine(copy.deepcopy(model))
    other = build_tiny_model(seed=5)
    ids, images = prompt(np.random.default_rng(2))
    sampling = Sampling(max_tokens=5, banned_ids=BANNED, seed=1)
    await engine.generate("s", ids, images, sampling)
    await engine.update_weights(other, 1)
    a, b = await engine.generate("s", ids, images, sampling), await TorchEngine(other).generate("s", ids, images, sampling)
    assert a.ids == b.ids and set(a.versions) == {1}
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


async def test_a_vision_tower_that_changed_sees_anew(model):
    engine = TorchEngine(copy.deepcopy(model))
    ids, images = prompt(np.random.default_rng(2))
    sampling = Sampling(max_tokens=3, banned_ids=BANNED, seed=1)
    await engine.generate("s", ids, images, sampling)
    text = {n: w + 0.01 for n, w in model.state_dict().items() if ".visual." not in n}
    await engine.update_weights(text, 1)
    await engine.generate("s", ids, images, sampling)
    assert engine.vlm.cache.computed == 1
    vision = copy.deepcopy(engine.model)
    with torch.no_grad(): vision.model.visual.merger.linear_fc2.weight.mul_(1.5)
    await engine.update_weights(vision, 2)
    a, b = await engine.generate("s", ids, images, sampling), await TorchEngine(vision).generate("s", ids, images, sampling)
    assert engine.vlm.cache.computed == 2 and a.ids == b.ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


@pytest.mark.parametrize("worker", [False, True])
async def test_a_caller_that_gives_up(model, worker):
    ids, images = prompt(np.random.default_rng(3))
    engine = TorchEngine(model, worker=worker)
    call = asyncio.create_task(engine.generate("s", ids, images, Sampling(max_tokens=2000, banned_ids=BANNED)))
    if worker:
        while engine.stats["sampled"] < 3: await asyncio.sleep(0.001)
    else: await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError): await call
    sampling = Sampling(max_tokens=3, banned_ids=BANNED, seed=4)
    while engine._active: await asyncio.sleep(0.001)
    assert (await engine.generate("s", ids, images, sampling)).ids == (await TorchEngine(model).generate("t", ids, images, sampling)).ids
    await engine.close()


async def test_a_failing_model_fails_its_calls_and_no_others(model):
    ids, images = prompt(np.random.default_rng(3))
    engine = TorchEngine(copy.deepcopy(model))
    with torch.no_grad(): engine.model.lm_head.weight[50] = float("nan")
    sampling = Sampling(max_tokens=3, banned_ids=BANNED, seed=4)
    failed = await asyncio.gather(*[engine.generate(str(i), ids, images, sampling) for i in range(3)], return_exceptions=True)
    assert all(isinstance(e, EngineError) and "not finite" in str(e) for e in failed)
    await engine.update_weights(model, 1)
    good = await asyncio.gather(*[engine.generate(str(i), ids, images, sampling) for i in range(3)])
    expected = await TorchEngine(model).generate("t", ids, images, sampling)
    assert all(g.ids == expected.ids for g in good)


async def test_two_event_loops_one_after_the_other(model):
    ids, images = prompt(np.random.default_rng(3))
    engine = TorchEngine(model)
    sampling = Sampling(max_tokens=3, banned_ids=BANNED, seed=4)
    def run(): return asyncio.run(engine.generate("s", ids, images, sampling)).ids
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, run) == await loop.run_in_executor(None, run)


async def test_another_family():
    "GLM-4V: no deepstack, its own vision tower and rotary embedding, all through the stock forwards."
    text = dict(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=512,
                rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 3, 3], partial_rotary_factor=0.5), pad_token_id=0, eos_token_id=EOS)
    vision = dict(depth=2, hidden_size=32, intermediate_size=64, num_heads=1, image_size=112, patch_size=8, out_hidden_size=64, spatial_merge_size=2, temporal_patch_size=2)
    torch.manual_seed(0)
    glm = Glm4vForConditionalGeneration(Glm4vConfig(text_config=text, vision_config=vision, image_token_id=IMAGE_PAD, video_token_id=BANNED[1], image_start_token_id=VISION_START,
                                                    image_end_token_id=VISION_END, video_start_token_id=7, video_end_token_id=8)).eval()
    with torch.no_grad(): glm.get_input_embeddings().weight.normal_(0, 0.5); glm.lm_head.weight.normal_(0, 0.3)
    engine = TorchEngine(glm)
    played = await asyncio.gather(*[play(engine, f"r{i}", 4, window(1, 2), seed=i) for i in range(3)])
    for segments, images in played:
        for s in segments: np.testing.assert_allclose(s.logp, stock_logprobs(glm, s, images, 0.8), atol=1e-5)


def test_a_model_with_other_layers_is_refused():
    config = tiny_config()
    model = Qwen3VLForConditionalGeneration(config)
    model.config.text_config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(EngineError, match="linear_attention layers.*use engine.vllm"): TorchEngine(model)


def test_colours_normalised_as_the_processor_says(model):
    processor = tiny_image_processor()
    processor.image_mean, processor.image_std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    images = [screen(np.random.default_rng(i)).image for i in range(3)]
    pixels = processor(images=images, return_tensors="pt")
    with torch.no_grad():
        stock = model.model.get_image_features(pixels["pixel_values"], pixels["image_grid_thw"], return_dict=True).pooler_output
        ours = VisionLanguage(model, processor).features(images)
        assert not torch.allclose(ours[0][0], image_features(model, images)[0][0], atol=1e-3)
    for a, b in zip(ours, stock): torch.testing.assert_close(a[0], b, atol=1e-5, rtol=1e-5)
