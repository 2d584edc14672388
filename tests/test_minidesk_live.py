"""MiniDesk live: after every move the real screen is the simulated one, pixel for pixel, and judges read the same state."""
import random
import pytest
from scalecua_nb.agent.agents import ScriptedAgent
from scalecua_nb.agent.episode import Limits, run_episode
from scalecua_nb.core.actions import DoubleClick, Key, LeftClickDrag, RightClick, Type
from scalecua_nb.desktop.base import Desktop, DesktopError
from scalecua_nb.desktop.bubble import check
from scalecua_nb.desktop.minidesk import MiniDesk, cell_point
from scalecua_nb.desktop.minidesk_live import LiveMiniDesk
from scalecua_nb.desktop.minidesk_state import STATE_PATH, desk, widget, window
from scalecua_nb.verigen.grammar_minidesk import layout_grammar
from scalecua_nb.verigen.script import compile_script

try: check(); missing = ''
except DesktopError as e: missing = str(e)
pytestmark = [pytest.mark.desktop, pytest.mark.slow, pytest.mark.skipif(bool(missing), reason=missing)]


async def alike(live, simulated, actions=None):
    "The same step on both; screens and results must be the same."
    if actions is not None:
        a, b = await simulated.act(actions), await live.act(actions)
        assert [r.ok for r in a.results] == [r.ok for r in b.results]
        assert a.observation.sha256 == b.observation.sha256, actions
    assert (await simulated.observe()).sha256 == (await live.observe()).sha256
    assert await live.read_file(STATE_PATH) == await simulated.read_file(STATE_PATH)


async def test_episodes_are_alike_pixel_for_pixel():
    rng, simulated = random.Random(0), MiniDesk()
    async with LiveMiniDesk() as live:
        assert isinstance(live, Desktop)
        for family in ('check_3', 'menu', 'move', 'popup', 'code_3', 'recall_3', 'set_near', 'chain_3'):
            c = layout_grammar.propose(rng.randrange(1000), family)
            await simulated.reset(c.task); await live.reset(c.task); await alike(live, simulated)
            for step in c.oracle: await alike(live, simulated, list(step.actions))


async def test_odd_input_is_alike_too():
    state = desk(window('A', [widget('field', 'F', (0, 1), length=3), widget('file', 'K', (4, 1)), widget('folder', 'X', (5, 3)), widget('check', 'C', (2, 3)), widget('button', 'B', (3, 3))]), window('T', []))
    simulated = MiniDesk()
    async with LiveMiniDesk(n=5) as live:
        for d in (simulated, live): await d.reset(); await d.setup([dict(type='minidesk', parameters=dict(state=state))])
        at = lambda c, r: cell_point((c, r))
        for actions in ([DoubleClick(coordinate=at(2, 3))], [RightClick(coordinate=at(3, 3))], [LeftClickDrag(start_coordinate=at(4, 1), coordinate=at(5, 3))], [Type(text='A')],
                        [DoubleClick(coordinate=at(0, 1)), Type(text='kéx!')], [Key(text='BackSpace')], [Key(text='shift+l')], [Key(text='ctrl+a')], [Type(text='ABC')], [DoubleClick(coordinate=at(1, 0))]):
            await alike(live, simulated, actions)


async def test_a_scripted_episode_ends_alike():
    c = layout_grammar.propose(3, 'code_2'); ends = []
    async with LiveMiniDesk() as live:
        for d in (MiniDesk(), live):
            ep = await run_episode(ScriptedAgent(compile_script(c.oracle), d), d, c.task, Limits(20))
            ends.append((ep.end, [o.sha256 for o in ep.observations]))
    assert ends[0] == ends[1]
