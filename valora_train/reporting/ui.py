"""`make ui`: MLflow's pages, after links to the latest fusions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import mlflow

from valora_train.errors import TrackingError
from valora_train.reporting import tracking
from valora_train.reporting.tracking import LOCAL_SERVER


def latest_fusions() -> list[tuple[str, str, str | None]]:
    """Experiment, name and address of the latest fusion of every task, the latest one first."""
    found: dict[str, tuple[str, str, str | None]] = {}
    with tracking.storing():
        ours = mlflow.search_experiments(filter_string="name LIKE 'valora/%'")
        tracking.find_moved(mlflow.get_tracking_uri())
        names = {one.experiment_id: one.name for one in ours}
        for run in tracking.search(f"tags.`{tracking.FUSION}` LIKE '%'", list(names)):
            name = names[run.info.experiment_id]
            if name not in found and tracking.is_fusion(run):
                found[name] = name, run.info.run_name, tracking.find_run(run.info.run_id)
    return list(found.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """Print links and serve MLflow's pages until Ctrl-C; other options are `mlflow server`'s."""
    parser = argparse.ArgumentParser(
        description="Serves MLflow's pages. Other options are those of `mlflow server`."
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=5000, help="port to listen on")
    parser.add_argument("--backend-store-uri", help="tracking URI; default: MLflow's")
    options, rest = parser.parse_known_args(arguments)
    tracking.use_store(options.backend_store_uri)
    uri, server = mlflow.get_tracking_uri(), f"http://{options.host}:{options.port}"
    try:
        found = latest_fusions()
    except TrackingError as error:
        sys.exit(f"error: {error}")
    for experiment, run, address in found:
        print(f"{experiment}  {run}\n  {str(address).replace(LOCAL_SERVER, server, 1)}")
    print("" if found else "no fusion has run in this folder yet: make fuse", flush=True)
    if uri.startswith(("http://", "https://")):
        return  # that server shows the pages
    # Jobs are for evaluations of language models; their runners only take memory here.
    os.environ.setdefault("MLFLOW_SERVER_ENABLE_JOB_EXECUTION", "false")
    command = ["mlflow", "server", "--workers", "1", *rest]
    command += ["--backend-store-uri", uri, "--host", options.host, "--port", str(options.port)]
    os.execv(sys.executable, [sys.executable, "-m", *command])  # Ctrl-C reaches MLflow itself


if __name__ == "__main__":
    main()
