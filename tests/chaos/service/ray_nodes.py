"""`python -m tests.chaos.service.ray_nodes`: owns a Ray cluster, and does what each line of stdin says.

`add ADDRESS` starts a node with room for one worker there, `remove ADDRESS` kills it. Each is answered by a line when
it is done. The first line tells the cluster's address and the variables by which commands are let in. The cluster ends
with stdin. It is a process of its own, because Ray blocks, and takes signal handlers for itself.
"""

import json
import os
import sys
from typing import Any

from tests.ray_cluster import ray_cluster

VARIABLES = ("RAY_TMPDIR", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_USAGE_STATS_ENABLED")


def main() -> None:
    with ray_cluster(head_cpus=1) as cluster:
        nodes: dict[str, Any] = {}
        variables = {name: os.environ[name] for name in VARIABLES}
        print(json.dumps({"address": cluster.address, "variables": variables}), flush=True)
        for line in sys.stdin:
            verb, address = line.split()
            if verb == "add":
                nodes[address] = cluster.add_node(num_cpus=1, node_ip_address=address)
            else:
                cluster.remove_node(nodes.pop(address), allow_graceful=False)
            print(json.dumps({verb: address}), flush=True)


if __name__ == "__main__":
    main()
