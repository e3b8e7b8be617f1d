"""A worker's report on how it received an update."""

import msgspec
import zmq

from actors.engines.vllm.weights import WorkerReport
from actors.engines.vllm.worker_receiver import UpdateInfo, WorkerReceiver
from streamrl.curve import serve_with_new_key
from tests.ports import free_port


def test_a_report_reaches_a_reader_that_is_late_and_takes_no_other():
    address = f"tcp://127.0.0.1:{free_port()}"
    worker = WorkerReceiver.__new__(WorkerReceiver)
    with zmq.Context() as context, context.socket(zmq.PULL) as reader:
        key = serve_with_new_key(reader)
        with context.socket(zmq.PUSH) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(address)
            stranger.send(b"not a report")
            info = UpdateInfo(attempt=1, report_to=address, report_key=key)
            worker._send(info, WorkerReport(1, "too late for anybody"))
            worker._send(info, WorkerReport(2))
            reader.bind(address)
            assert reader.poll(20_000), "no report"
            assert msgspec.json.decode(reader.recv(), type=WorkerReport) == WorkerReport(2)
            assert not reader.poll(500)
