"""A worker's report on how it received an update."""

import msgspec
import zmq

from actors.engines.vllm.receiver import WeightReceiver
from actors.engines.vllm.weights import Report
from tests.ports import free_port


def test_a_report_reaches_a_reader_that_is_late():
    address = f"tcp://127.0.0.1:{free_port()}"
    worker = WeightReceiver.__new__(WeightReceiver)
    worker._send(address, Report(1, "too late for anybody"))
    worker._send(address, Report(2))
    with zmq.Context() as context, context.socket(zmq.PULL) as reader:
        reader.bind(address)
        assert reader.poll(20_000), "no report"
        assert msgspec.json.decode(reader.recv(), type=Report) == Report(2)
