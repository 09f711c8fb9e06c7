"""Every name that Baton uses on NATS. Services with different namespaces may share a server.

| name | what | carried by |
|---|---|---|
| `baton.<ns>.kv_events.<worker_id>` | KvEventBatch | stream `BATON_<ns>_KV_EVENTS` |
| `$KV.baton_<ns>_workers.<worker_id>` | WorkerRecord | bucket `baton_<ns>_workers` |
| `baton.<ns>.load.<worker_id>` | LoadReport | core NATS |
| `baton.<ns>.charges.<router_id>` | ChargeReport | core NATS |
| `baton.<ns>.router.<router_id>` | RouterReport | core NATS |
| `baton.<ns>.rates.<router_id>` | RateReport | core NATS |
| `baton.<ns>.ask.<router_id>.<question>` | questions of a router to another one | core NATS, request and reply |
| `baton.<ns>.left_answers` | questions of a router to all workers, see LeftAnswer | core NATS, request and reply |
| `$KV.baton_<ns>_responses.<response_id>` | SavedResponse | bucket `baton_<ns>_responses` |
| `baton.<ns>.planner` | questions to the planner and its answers | core NATS, request and reply |
| `baton.<ns>.supervisor` | questions to the supervisor and its answers | core NATS, request and reply |
| `baton.<ns>.wake` | questions of a router to the supervisor, see waking | core NATS, request and reply |
| `$KV.baton_<ns>_planner.<key>` | what the planner remembers | bucket `baton_<ns>_planner` |
| `$KV.baton_<ns>_adapters.wanted` | adapters that operators have loaded | bucket `baton_<ns>_adapters` |

Worker and router ids and namespaces are single subject tokens: no dots, spaces or wildcards.
"""

ANY = "*"


def kv_events_subject(namespace: str, worker_id: str = ANY) -> str:
    return _subject(namespace, "kv_events", worker_id)


def kv_events_stream(namespace: str) -> str:
    return f"BATON_{namespace}_KV_EVENTS"


def load_subject(namespace: str, worker_id: str = ANY) -> str:
    return _subject(namespace, "load", worker_id)


def charges_subject(namespace: str, router_id: str = ANY) -> str:
    return _subject(namespace, "charges", router_id)


def router_subject(namespace: str, router_id: str = ANY) -> str:
    return _subject(namespace, "router", router_id)


def rates_subject(namespace: str, router_id: str = ANY) -> str:
    return _subject(namespace, "rates", router_id)


def ask_subject(namespace: str, router_id: str, question: str) -> str:
    return _subject(namespace, "ask", router_id, question)


def left_answers_subject(namespace: str) -> str:
    return _subject(namespace, "left_answers")


def planner_subject(namespace: str) -> str:
    return _subject(namespace, "planner")


def supervisor_subject(namespace: str) -> str:
    return _subject(namespace, "supervisor")


def wake_subject(namespace: str) -> str:
    return _subject(namespace, "wake")


def planner_stream(namespace: str) -> str:
    return _bucket_stream(namespace, "planner")


def planner_key(namespace: str, key: str = ANY) -> str:
    return _bucket_key(namespace, "planner", key)


def responses_stream(namespace: str) -> str:
    return _bucket_stream(namespace, "responses")


def responses_key(namespace: str, response_id: str = ANY) -> str:
    return _bucket_key(namespace, "responses", response_id)


def adapters_stream(namespace: str) -> str:
    return _bucket_stream(namespace, "adapters")


def adapters_key(namespace: str, key: str) -> str:
    return _bucket_key(namespace, "adapters", key)


def workers_stream(namespace: str) -> str:
    return _bucket_stream(namespace, "workers")


def workers_key(namespace: str, worker_id: str = ANY) -> str:
    return _bucket_key(namespace, "workers", worker_id)


def worker_of(subject: str) -> str:
    """The worker id: the last token of the subject."""
    return subject.rpartition(".")[2]


def _subject(namespace: str, *tokens: str) -> str:
    return ".".join(("baton", namespace, *tokens))


def _bucket_stream(namespace: str, bucket: str) -> str:
    """The stream behind a bucket, as NATS names it."""
    return f"KV_baton_{namespace}_{bucket}"


def _bucket_key(namespace: str, bucket: str, key: str) -> str:
    """The subject on which a put of the key is published."""
    return f"$KV.baton_{namespace}_{bucket}.{key}"
