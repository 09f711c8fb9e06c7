"""`baton chat`: one question to the model, as a chat."""

from typing import Annotated

import typer

from baton.cli.terminal.access import Access
from baton.cli.terminal.answering import answer
from baton.cli.terminal.options import (
    DEFAULT_ADDRESS,
    AddressOption,
    ApiKeyFileOption,
    CaFileOption,
    JsonOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    StopOption,
    TemperatureOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
)
from baton_proto.generated import inference_pb2 as pb


def chat(
    question: Annotated[str, typer.Argument(metavar="QUESTION", help="What to ask.")],
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="How the model should behave.")] = None,
    temperature: TemperatureOption = None,
    max_tokens: MaxTokensOption = None,
    top_p: TopPOption = None,
    top_k: TopKOption = None,
    seed: SeedOption = None,
    stop: StopOption = None,
    model: ModelOption = "",
    timeout_s: TimeoutOption = None,
    address: AddressOption = DEFAULT_ADDRESS,
    api_key_file: ApiKeyFileOption = None,
    ca_file: CaFileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask the model a question and see the answer as it is written."""
    request = chat_request(question, system)
    request.model = model
    request.sampling.CopyFrom(
        pb.SamplingOptions(
            temperature=temperature, max_tokens=max_tokens, top_p=top_p, top_k=top_k, seed=seed, stop=stop or []
        )
    )
    answer(request, Access(address, api_key_file, ca_file), timeout_s, as_json)


def chat_request(question: str, system: str | None = None) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role="system", content=system)] if system is not None else []
    messages.append(pb.ChatMessage(role="user", content=question))
    return pb.GenerateRequest(chat=pb.ChatMessages(messages=messages))
