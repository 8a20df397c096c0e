"""A program with the factory's launchers, whose jobs only write a file, or fail.

``python -m tests.support.tiny_sweep CONF -m name=a,b +do={b:die}`` reads its settings in CONF.
"""

import os
import signal
import sys
import time
from pathlib import Path

import hydra

from valora_train.cli import sentence
from valora_train.errors import StageError
from valora_train.sweeps import SWEEP, register

CONF = Path(__file__).parents[2] / "conf"
CONFIG = f"""
defaults: [override hydra/job_logging: none, override hydra/hydra_logging: none]
name: a
do: {{}}
hydra: {{searchpath: ["file://{CONF}"], output_subdir: null, sweep: {{dir: sweep}}}}
"""


def job(config):
    """Do what the settings say for the job's name; an unknown thing is an error of the code."""
    do = config.do.get(config.name, "write")
    if do == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    elif do == "refuse":
        raise StageError(f"{config.name} is refused: choose another")
    elif do == "write_late":
        time.sleep(2)
    elif do != "write":
        raise ZeroDivisionError(do)
    said = {"pid": os.getpid(), "sweep": os.environ.get(SWEEP), "cwd": str(Path.cwd())}
    said["gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    Path(f"{config.name}.txt").write_text(repr(said), encoding="utf-8")
    return {"worst_margin": 0.5}


def main(folder):
    """Run the sweep that the command line asks for."""
    os.environ["HYDRA_FULL_ERROR"] = "1"
    register(sys.argv[1:])
    try:
        hydra.main(config_path=folder, config_name="config", version_base="1.3")(job)()
    except Exception as error:  # noqa: BLE001 (as the command does)
        sys.exit(f"error: {sentence(error)}")


if __name__ == "__main__":
    main(sys.argv.pop(1))
