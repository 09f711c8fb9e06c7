"""What both kinds of workers share while they run: the engine and its thread, the event and metrics planes, the state.
Event loop only."""

import asyncio

import msgspec
import structlog

from baton_proto.decoding import MAX_TEXT
from baton_proto.discovery import MAJOR as DISCOVERY_MAJOR, LoadReport, WorkerLoad, weights_tag
from baton_proto.grammar import Grammar
from baton_proto.worker import MAJOR, Hello
from engine.sequences.output import StepOutput
from runtime.config.serving import ServingConfig
from runtime.discovery.directory import Announcer
from runtime.errors import BatonError, ModelError, UnavailableError
from runtime.grammar.matcher import Matcher
from runtime.host import process_name
from runtime.kv_events.publisher import EventPublisher
from runtime.security.keys import Keys
from worker.engine_bridge import EngineBridge
from worker.engines.base import EngineAssembly
from worker.gathered_steps import GATHER_S
from worker.metrics import WorkerMetrics
from worker.requests.role import Role
from worker.step_stream import StepStreams

log = structlog.get_logger()


class WorkerRuntime:
    def __init__(
        self,
        config: ServingConfig,
        worker_id: str,
        incarnation: int,
        assembly: EngineAssembly,
        publisher: EventPublisher,
        metrics: WorkerMetrics,
        keys: Keys,
    ) -> None:
        self.config = config
        self.keys = keys
        self.worker_id = worker_id
        self.incarnation = incarnation
        self.hello = Hello(MAJOR, worker_id, incarnation, process=process_name())
        self.assembly = assembly
        self.publisher = publisher
        self.bridge = EngineBridge(
            assembly.engine,
            assembly.make_loop,
            self._step_done,
            lambda output: self.role.step_done(output),
            GATHER_S,
        )
        self.metrics = metrics
        self.draining = False
        self.lacks = ""  # adapters that it should have, and why it has them not
        self.weights = 0  # see `note_weights`
        self.announcer: Announcer | None = None  # set when the servers listen
        self._engine_load = WorkerLoad()
        self._role: Role | None = None
        self._streams: StepStreams | None = None

    def attach(self, role: Role) -> StepStreams:
        """Adds the role, which is built with this object and so comes second."""
        self._role = role
        self._streams = StepStreams(role, GATHER_S, lambda: self.load)
        self.metrics.leases = role.peers.lease_count
        return self._streams

    @property
    def role(self) -> Role:
        assert self._role is not None, "attach comes before anything runs"
        return self._role

    @property
    def asleep(self) -> tuple[str, ...]:
        """Tags of the memory that is given back."""
        return self.assembly.memory.asleep

    @property
    def state(self) -> str:
        return "sleeping" if self.asleep else "draining" if self.draining else "ready"

    def note_weights(self) -> None:
        """Before the first request, and before the first one after an update."""
        self.weights = weights_tag(self.assembly.model_hash)

    async def announce(self) -> None:
        """Tells the state, and which weights they are, to discovery and the metrics."""
        self.metrics.state = self.state
        if self.announcer is not None:
            await self.announcer.set_state(self.state, self.assembly.model_hash)

    async def tell(self) -> None:
        """Tells discovery what may have changed about the engine."""
        if self.announcer is not None:
            note = "; ".join(filter(None, (self.assembly.note(), self.lacks)))
            await self.announcer.tell(note[:MAX_TEXT], self.assembly.adapter_names, self.assembly.adapter_folders)

    @property
    def load(self) -> WorkerLoad:
        """The load as of the last step or `fresh_load`."""
        peers = self.role.peers
        return msgspec.structs.replace(
            self._engine_load,
            leases=peers.lease_count(),
            last_event_id=self.publisher.last_event_id,
            prompts=peers.num_prompts,
        )

    async def fresh_load(self) -> WorkerLoad:
        """The load of this moment. Waits for the running step to end."""
        self._engine_load = await self.bridge.call(lambda engine: engine.load())
        return self.load

    async def load_report(self) -> LoadReport:
        """A report for the metrics plane, with the steps timed since the last report. Waits for the running step to
        end."""
        self._engine_load, pace = await self.bridge.call(lambda engine: (engine.load(), engine.pace()))
        return LoadReport(
            version=DISCOVERY_MAJOR,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            load=self.load,
            **msgspec.structs.asdict(pace),
        )

    async def drain(self, timeout_s: float) -> int:
        """Takes no new request from now on. Returns how many are in flight when all have ended or the time is up."""
        self.draining = True
        await self.announce()
        return await self.role.in_flight.wait_empty(timeout_s)

    async def read_vocabulary(self) -> None:
        """Before the first request, because it holds Python's lock for up to a second."""
        if self.assembly.limits.masks:
            return
        try:
            await asyncio.to_thread(self.assembly.grammars.read_vocabulary)
        except ModelError as error:
            log.warning("requests with grammars are refused", worker=self.worker_id, reason=str(error))

    async def matcher(self, grammar: Grammar | None) -> Matcher:
        """Raises BatonError alone, because a request whose grammar fails otherwise would have no end."""
        assert grammar is not None
        try:
            return await self.assembly.grammars.matcher_soon(grammar)
        except BatonError:
            raise
        except Exception as error:  # no memory, or a fault of ours
            log.error("a grammar was not compiled", worker=self.worker_id, exc_info=error)
            raise UnavailableError(f"the grammar was not compiled: {error!r}") from error

    def _step_done(self, output: StepOutput, load: WorkerLoad) -> None:
        """Passes the tokens on first, because clients wait for them."""
        self._engine_load = load
        self.role.outputs(output.outputs)
        if self._streams is not None:
            self._streams.step_is_over()
        if output.events:
            self.publisher.publish(output.events)
        self.metrics.observe(load, output.step_ms)
