"""`POST /update_weights?model=FOLDER&worker=&served_model=`: new weights for one worker, or for all or none."""

from collections.abc import Callable

from google.protobuf.json_format import MessageToDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from baton_proto.generated import inference_pb2 as pb
from router.api.http.json_response import json_response
from router.api.operators.guard import OperatorsGuard
from router.views.weights_control import WeightsControl


def weights_route(of_model: Callable[[str], WeightsControl], guard: OperatorsGuard) -> Route:
    """`of_model`: of the one that is named; it raises InvalidRequestError."""

    async def update(http: Request) -> Response:
        """Status 503 when a worker has a `problem`."""
        query = http.query_params
        request = pb.UpdateWeightsRequest(model=query.get("model", ""), worker_id=query.get("worker", ""))
        answer = await of_model(query.get("served_model", "")).update(request)
        failed = any(worker.problem for worker in answer.workers)
        return json_response(MessageToDict(answer, preserving_proto_field_name=True), 503 if failed else 200)

    return Route("/update_weights", guard.guarded(update), methods=["POST"])
