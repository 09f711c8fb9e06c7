"""A real Ray cluster for tests, on this machine: a head node and as many others as asked for, each at a loopback
address of its own.

    with ray_cluster() as cluster:
        node = cluster.add_node(num_cpus=2, node_ip_address="127.0.0.3")
        run("up", "--ray", "--address", cluster.address)

Authentication is on. Nothing of it is found by accident: ports are free ones, and its folder is not the one in which
Ray looks for clusters.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

HEAD_ADDRESS = "127.0.0.2"  # not 127.0.0.1, which Ray would replace by the machine's own
START_S = "120"  # on busy cores Ray's own 30 do not always suffice
TOKEN = "a" * 64  # the same for all: a process that has used one token uses no other


@contextmanager
def ray_cluster(head_cpus: int = 4, head_gpus: int = 0) -> Iterator[Any]:
    """A ray.cluster_utils.Cluster. What the test starts inherits the variables that it takes to be let in."""
    folder = Path(tempfile.mkdtemp(prefix="br-", dir="/tmp"))  # a short path: Ray puts sockets there
    token = folder / "token"
    token.write_text(TOKEN)
    variables = {
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    with mock.patch.dict(os.environ, variables):
        from ray.cluster_utils import Cluster

        with mock.patch.dict(os.environ, {"RAY_gcs_server_port_wait_time_s": START_S}):  # who connects waits no longer
            cluster = Cluster(
                initialize_head=True,
                head_node_args={
                    "num_cpus": head_cpus,
                    "num_gpus": head_gpus,
                    "node_ip_address": HEAD_ADDRESS,
                    "include_dashboard": False,
                    "dashboard_port": 0,
                    "include_log_monitor": False,
                },
            )
        try:
            yield cluster
        finally:
            cluster.shutdown()
            shutil.rmtree(folder, ignore_errors=True)
