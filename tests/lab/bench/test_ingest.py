"""The bench of long prompts over HTTP: that all are answered and every figure is there, not how fast."""

from __future__ import annotations

import orjson

from p99lab.lab.bench import ingest
from p99lab.lab.bench.ingest_client import Bodies, Order


def test_every_stretch_gives_its_rows() -> None:
    sizes = {"prompt_len": 300, "question_len": 20, "answer_len": 3, "num_decoding": 2}
    bench = ingest.IngestBench(**sizes, prompts_per_s=20, step_ms=2, seconds=0.3, settling_s=0.1)
    rows = {row.name: row for row in ingest.run(bench)}
    assert len(rows) == 7
    for percent in (50, 99):
        row = rows[f"step P{percent}, prompts over HTTP"]
        assert row.floor is not None
        assert row.floor >= 2.0  # no step is shorter than it sleeps
        assert row.ratio_to_floor == row.value / row.floor
    assert rows["gateway, CPU a prompt"].value > 0


def test_bodies_hold_a_document_and_a_question_of_their_own() -> None:
    order = Order(prompts_per_s=4, prompt_len=50, question_len=5, answer_len=7, num_documents=2, seconds=1)
    asked, bodies = ingest.IngestPrompts.draw(order), Bodies(order)
    for number in range(4):
        body = orjson.loads(bodies[number])
        assert (len(body["prompt"]), body["max_tokens"]) == (50, 7)
        assert body["prompt"] == asked.prompt(number).tolist()
    assert orjson.loads(bodies[0])["prompt"][:45] == orjson.loads(bodies[2])["prompt"][:45]
