"""Any sequence of loads, unloads, faults and restarts serves what a simple table says.

Adapters that requests load are in it only under names that no operator has given.
"""

import asyncio
import contextlib
import errno
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.support.disk_faults import failing
from tests.support.fake_engine import FakeEngine
from tests.support.http_helpers import bundle as write_bundle
from tests.support.http_helpers import entry
from valora_data.errors import ValoraError
from valora_serve.errors import StorageError, UnknownModelError
from valora_serve.server.loading import startup
from valora_serve.server.loading.served_set import ServedSet
from valora_serve.server.loading.state_file import StateFile
from valora_serve.types import NewContext

FOLDERS = {  # name of the bundle, and its domains
    "cars-1": ("cars", ("car",)),
    "cars-2": ("cars", ("car", "van")),
    "vans": ("vans", ("van", "bus")),
    "boats": ("boats", ("boat",)),
}
COMMAND_LINE = {"cars-0": ("cars", ("car", "bus")), "boats-0": ("boats", ("boat", "ship"))}
ADAPTERS = ("a", "b")
NAMES = ("x", "y", "car")
ASKED = (*NAMES, "van", "ship", "SHIP", "cars", "cars/7", "Vans/7", "Person", "free")
BUILT_IN = {model.name: model.root for model in FakeEngine().models()}


class Killed(BaseException):
    """The process dies here."""


class Serving(RuleBasedStateMachine):
    """The table: folder and domains of each served bundle, folder of each adapter.

    Beside it, what requests have loaded, and the names that are kept from them: those that the
    process has heard of, and those of bundles, which outlive it.
    """

    @initialize()
    def start(self):
        self.place = Path(tempfile.mkdtemp())
        for name, (bundle, domains) in (FOLDERS | COMMAND_LINE).items():
            folder = self.place / ("adapters" if name in FOLDERS else "bundles") / name
            write_bundle(folder, domains, bundle)
        for name in (*ADAPTERS, "../store"):
            folder = self.place / "adapters" / name
            folder.mkdir()
            (folder / "adapter_config.json").write_text("{}")
            (folder / "adapter_model.safetensors").write_bytes(b"\0" * 8)
        self.bundles = {
            bundle: (self.place / "bundles" / name, domains)
            for name, (bundle, domains) in COMMAND_LINE.items()
        }
        self.adapters, self.contexts = {}, set()
        self.lasting = {n for bundle, names in COMMAND_LINE.values() for n in (bundle, *names)}
        self.boot()

    def boot(self):
        self.found = set()
        self.kept = {*self.lasting, *self.adapters, *self.contexts, "d"}
        self.kept |= {name.lower() for name in BUILT_IN}
        self.engine = FakeEngine()
        file = self.place / "state" / "served.json"
        self.served = ServedSet(self.engine, self.place / "adapters", StateFile(file))
        found = [self.place / "bundles" / name for name in COMMAND_LINE]
        asyncio.run(startup.load_all(self.engine, found, self.served))

    def table(self):
        made = {name: str(folder) for name, folder in self.adapters.items()}
        made |= {name: str(self.place / "adapters" / "contexts" / name) for name in self.contexts}
        for folder, domains in self.bundles.values():
            made |= dict.fromkeys(domains, str(folder))
        return made

    def actual(self):
        found = {
            model.name: model.root.rpartition("-")[0] if model.form else model.root
            for model in self.engine.models()
        }
        return {name: root for name, root in found.items() if name not in BUILT_IN}

    def note(self, bundle, folder, domains):
        self.bundles[bundle] = (self.place / "adapters" / folder, domains)
        self.lasting |= {bundle, *domains}
        self.kept |= self.lasting

    def is_kept(self, name):
        bundles = {bundle for bundle, _ in (FOLDERS | COMMAND_LINE).values()}
        first = name.lower().split("/")[0]
        return name.lower() in self.kept or first in self.kept & bundles

    @rule(name=st.sampled_from(ASKED))
    def request(self, name):
        there = name in {model.name for model in self.engine.models()}
        assert self.served.reserves(name) == self.is_kept(name)
        try:
            asyncio.run(self.served.load_found(entry(name, self.place / "store")))
        except UnknownModelError:
            assert self.is_kept(name) and not there
        else:
            assert there or not self.is_kept(name)
            self.found |= set() if there else {name}

    def attempt(self, change, allowed, done, at):
        """Make a change, perhaps on a full disk; `done` enters it in the table."""
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with failing(self.place / "state", at, full):
            try:
                asyncio.run(change())
            except StorageError as error:
                assert "so nothing was changed" in str(error)
                assert at is not None and at < 6  # also where the change is not allowed
            except ValoraError:
                assert not allowed
            else:
                assert allowed
                done()

    def is_free(self, name, own, replace):
        """Whether a name may be given; `own` are those that may be replaced."""
        taken = name in {*self.table(), *self.found}
        return not taken or (replace and name in {*own, *self.found})

    faults = st.none() | st.integers(0, 8)

    @rule(name=st.sampled_from(NAMES), folder=st.sampled_from(ADAPTERS), replace=st.booleans(),
          at=faults)  # fmt: skip
    def load_adapter(self, name, folder, replace, at):
        def done():
            self.adapters[name] = self.place / "adapters" / folder
            self.kept.add(name)

        load = partial(self.served.load_adapter, name, folder, replace=replace)
        self.attempt(load, self.is_free(name, self.adapters, replace), done, at)
        self.gave_way({name})

    @rule(name=st.sampled_from(NAMES), at=faults)
    def unload_adapter(self, name, at):
        known = name in {*self.adapters, *self.found}
        unload = partial(self.served.unload, "adapter", name)
        self.attempt(unload, known, lambda: self.adapters.pop(name, None), at)
        self.gave_way({name})

    @rule(name=st.sampled_from(NAMES), replace=st.booleans(), at=faults)
    def make_context(self, name, replace, at):
        make = partial(self.served.make_context, NewContext(name, "No dogs."), replace=replace)
        done = lambda: (self.contexts.add(name), self.kept.add(name))  # noqa: E731
        self.attempt(make, self.is_free(name, self.contexts, replace), done, at)
        self.gave_way({name})

    @rule(name=st.sampled_from(NAMES), at=faults)
    def forget_context(self, name, at):
        forget = partial(self.served.forget_context, name)
        self.attempt(forget, name in self.contexts, lambda: self.contexts.remove(name), at)

    @rule(name=st.sampled_from(list(FOLDERS)), at=faults)
    def load_bundle(self, name, at):
        bundle, domains = FOLDERS[name]
        others = {d for key, (_, ds) in self.bundles.items() if key != bundle for d in ds}
        free = not {*others, *self.adapters, *self.contexts} & set(domains)
        load = partial(self.served.load_bundle, name)
        self.attempt(load, free, lambda: self.note(bundle, name, domains), at)
        self.gave_way({*domains, f"{bundle}/7"})

    def gave_way(self, names):
        """What requests have loaded may be gone only under these names."""
        gone = {name for name in self.found if name not in self.served.found}
        assert gone <= names
        self.found -= gone

    @rule(name=st.sampled_from(["cars", "vans", "boats", "cars@1"]), at=faults)
    def unload_bundle(self, name, at):
        short = name.partition("@")[0]
        unload = partial(self.served.unload_bundle, name)
        self.attempt(unload, short in self.bundles, lambda: self.bundles.pop(short), at)

    @rule()
    def restart(self):
        self.boot()

    @rule(name=st.sampled_from(list(FOLDERS)), at=st.integers(0, 8))
    def killed_while_loading(self, name, at):
        """Afterwards the load was made, or not."""
        before = (dict(self.bundles), dict(self.adapters))
        with failing(self.place / "state", at, Killed()), contextlib.suppress(Killed, ValoraError):
            asyncio.run(self.served.load_bundle(name))
        self.boot()
        if self.actual() != self.table():
            self.note(FOLDERS[name][0], name, FOLDERS[name][1])
            assert at > 5, before

    @rule(name=st.sampled_from([*FOLDERS, *ADAPTERS]))
    def restart_without_a_folder(self, name):
        """What lies in the folder is left out, and comes back with the folder."""
        folder = self.place / "adapters" / name
        shutil.move(folder, self.place / "away")
        self.boot()
        missing = {key for key, root in self.table().items() if root == str(folder)}
        assert self.actual() == {k: v for k, v in self.table().items() if k not in missing}
        shutil.move(self.place / "away", folder)
        self.boot()

    @invariant()
    def what_is_served_is_in_the_table(self):
        if hasattr(self, "engine"):
            found = dict.fromkeys(self.found, str(self.place / "store"))
            assert self.actual() == self.table() | found
            made = sorted(Path(model.root) for model in self.engine.models() if model.form)
            assert made == sorted(self.place.glob("adapters/contexts/*"))

    def teardown(self):
        if hasattr(self, "place"):
            shutil.rmtree(self.place)


TestServing = Serving.TestCase
TestServing.settings = settings(
    max_examples=30, stateful_step_count=12, deadline=None, derandomize=True
)
