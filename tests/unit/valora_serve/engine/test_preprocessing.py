"""What requests must have in common to share cached prompts and images."""

from dataclasses import replace

import pytest

from tests.support.engine_reference import add_requests, ask, finish, make_engine, noise, question

pytestmark = pytest.mark.usefixtures("one_thread")
SALTS = (None, "a", "b")


@pytest.mark.parametrize("together", [False, True])
def test_only_requests_of_one_salt_share_prompts_and_images(base, together):
    """Two requests of each salt with the same image, one after the other or all in one step."""
    engine = make_engine(base, policy="unmerge_only", block_size=4)
    asked = [
        replace(question(f"{salt}{n}"), cache_salt=salt, token_ids=None, images=[noise(20, 20, 1)],
                messages=ask("Look at this", images=1))
        for n in range(2) for salt in SALTS
    ]  # fmt: skip
    found = {}
    for requests in [asked] if together else [[one] for one in asked]:
        add_requests(engine, *requests)
        finish(engine, found)
    assert engine.images.encoded == len(SALTS)
    for name, got in found.items():
        usage = got.last.usage
        assert (usage.cached > 0) == (name.endswith("1") and not together), name
        assert usage.cached in (0, (usage.prompt - 1) // 4 * 4)
    assert len({tuple(got.tokens) for got in found.values()}) == 1  # a salt changes no answer
