"""An evaluation of more prompts than the engine has room for scores all of them."""

from actors.evaluation import greedy_groups_of
from actors.make_model import make_tokenizer
from streamrl.config import RunConfig
from tests.unit.test_generator import FakeEngine


async def test_prompts_that_wait_for_the_engine_have_their_whole_deadline(tmp_path):
    """It counts from the begin of an episode: those that have begun are few."""
    make_tokenizer("0123456789+=").save_pretrained(tmp_path)
    config = RunConfig.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"source": "addition", "num_eval_prompts": 10},
            "generator": {"max_num_seqs": 1},
        }
    )
    engine = FakeEngine()
    groups = await greedy_groups_of(config, engine)
    assert [group.prompt_index for group in groups] == list(range(10))
    assert engine.most_running == 2
