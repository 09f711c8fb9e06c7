"""The words for the reasons of a placement, for the command line and the labels of metrics: one table for each enum of
inference.proto."""

from typing import Final

from baton_proto.generated import inference_pb2 as pb

PLACED: Final = {
    pb.PLACEMENT_REASON_SHIPPED: "shipped",
    pb.PLACEMENT_REASON_DECODE_BUSY: "shipped, to spare the decode worker",
    pb.PLACEMENT_REASON_SHORT_PROMPT: "sooner there",
    pb.PLACEMENT_REASON_PREFILL_FULL: "prefill workers full",
    pb.PLACEMENT_REASON_NO_PREFILL: "no prefill worker",
    pb.PLACEMENT_REASON_KEPT: "kept by a prefill worker",
}
REASONS: Final = PLACED | {
    pb.PLACEMENT_REASON_WAITS_FOR_DECODE: "it would wait: no decode worker that can take it is ready",
    pb.PLACEMENT_REASON_WAITS_FOR_DECODE_ROOM: "it would wait: every decode worker has its limit of requests",
    pb.PLACEMENT_REASON_WAITS_FOR_PREFILL_ROOM: (
        "it would wait: every prefill worker has its fill of queued prompts, and no decode worker may run one"
    ),
    pb.PLACEMENT_REASON_TOO_LATE: "refused: its first token would have come too late",
}
BARRED: Final = {
    pb.BARRED_REASON_UNSPECIFIED: "",
    pb.BARRED_REASON_EXCLUDED: "excluded",
    pb.BARRED_REASON_QUEUE_FULL: "queue full",
    pb.BARRED_REASON_NO_ROOM: "has its limit of requests",
    pb.BARRED_REASON_PREFILL_FULL: "prefill workers full",
}
LEFT_OUT: Final = {
    pb.LEFT_OUT_REASON_MISFIT: "{}",
    pb.LEFT_OUT_REASON_NOT_READY: "is {}",
    pb.LEFT_OUT_REASON_UNREACHABLE: "the router cannot reach it",
    pb.LEFT_OUT_REASON_TOO_SMALL: "takes {} tokens at most",
    pb.LEFT_OUT_REASON_NO_DECODE: "no decode worker could take the request",
}
"""A sentence with a place for the detail."""
