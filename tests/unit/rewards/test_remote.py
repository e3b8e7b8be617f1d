"""Rewards behind a URL, against real servers: what they send, read, repeat and give up."""

import json

import pytest

from actors.rewards import make_reward
from streamrl.config.data import DataSettings
from streamrl.errors import ConfigError, RewardError
from streamrl.interfaces import Score
from tests.ports import free_port
from tests.unit.rewards.episodes import episode, values
from tests.unit.rewards.services import serving


def made(reward: str, url: str, *, limits: dict | None = None, **kwargs: object):
    entry = {"reward": reward, "kwargs": {"url": url, **kwargs}, **(limits or {})}
    return make_reward(DataSettings.model_validate({"source": "addition", "rewards": [entry]}))


def says(text: str):
    return {"id": "x", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}]}


class TestJudge:
    async def test_it_reads_the_episode_and_its_score_is_scaled(self, monkeypatch):
        monkeypatch.setenv("JUDGE_KEY", "secret")
        prompt = "{prompt}|{response}|{answer}|{rubric}|{unknown}|{conversation}"
        async with serving(lambda body: (200, says('Fine. {"score": 7.5}'))) as service:
            settings = {"model": "m", "prompt": prompt, "api_key_env": "JUDGE_KEY", "system": "Be"}
            reward = made("judge", f"{service.url}/v1", **settings)
            assert values(await reward.score([episode("{answer}", rubric="r")])) == [0.75]
        ((path, head, body),) = service.requests
        assert path == "/v1/chat/completions"
        assert "authorization: Bearer secret" in head
        system, user = body["messages"]
        assert (body["model"], body["temperature"], system["content"]) == ("m", 0.0, "Be")
        talk = "user: question\n\nassistant: {answer}"
        assert user["content"] == f"question|{{answer}}|42|r|{{unknown}}|{talk}"

    async def test_the_last_score_counts(self):
        text = "Score: 3 would be harsh.\nScore: 9"
        async with serving(lambda body: (200, says(text))) as service:
            reward = made("judge", service.url, model="m", scale=[1, 9])
            assert values(await reward.score([episode()])) == [1.0]

    @pytest.mark.parametrize(
        ("text", "reward"),
        [
            ("Score (0-10): 7", 0.7),
            ("Score [0 to 10]: 7", 0.7),
            ("Score: 7 (a lower score, 3, would be harsh)", 0.7),
            ("**Score: 5/10**", 0.5),
            ("Score: .5", 0.05),
            ("Score: ...7/10", 0.7),
            ('{"score": 7,"reason": "9"}', 0.7),
            ("The score is 6 out of 10.", 0.6),
            ("Score: 5e-1", 0.05),
            ("Rating: [[8]]", 0.8),
            ("Final score: $\\boxed{8}$", 0.8),
            ("<think>Score: 2?</think>A 9, that is: score 9", 0.9),
        ],
    )
    async def test_a_score_is_read_as_judges_write_it(self, text, reward):
        async with serving(lambda body: (200, says(text))) as service:
            judge = made("judge", service.url, model="m", temperature=None, max_tokens=None)
            assert values(await judge.score([episode()])) == [reward]
        ((_, _, body),) = service.requests
        assert set(body) == {"model", "messages"}

    @pytest.mark.parametrize(
        "text",
        [
            "no idea",
            "Score: 11",
            "Score: -1",
            "Score: 4/5",
            "Score: 9%",
            "Score: **4** (out of 5)",
            "Score: 7,5",
            "",
            "<think>Score: 7?",
        ],
    )
    async def test_nonsense_is_asked_again_and_then_fails_the_group(self, text):
        async with serving(lambda body: (200, says(text))) as service:
            reward = made("judge", service.url, limits={"retries": 1}, model="m")
            with pytest.raises(RewardError, match=r"reward judge: gave no score from 0 to 10.*2 t"):
                await reward.score([episode()])
        assert len(service.requests) == 2

    @pytest.mark.parametrize(
        ("kwargs", "sentence"),
        [
            ({}, r"data\.rewards\[0\]\.kwargs\.model: is required"),
            ({"model": "m", "url": "judge:80"}, r"kwargs\.url: was 'judge:80'; it begins with"),
            (
                {"model": "m", "api_key_env": "NO_SUCH"},
                "there is no NO_SUCH in the environment",
            ),
            ({"model": "m", "score_pattern": "Score"}, r"kwargs\.score_pattern: .*needs one group"),
            ({"model": "m", "scale": [1, 1]}, r"kwargs\.scale: was \[1\.0, 1\.0\]"),
            ({"model": "m", "modle": "m"}, r"kwargs\.modle: unknown key; did you mean 'model'"),
            ({"model": "m", "prompt": ""}, r"kwargs\.prompt: was ''"),
            ({"model": "m", "prompt": "nowhere.md"}, r"kwargs\.prompt: cannot read nowhere\.md"),
        ],
    )
    def test_settings_that_cannot_be_are_refused(self, kwargs, sentence):
        with pytest.raises(ConfigError, match=sentence):
            made("judge", **{"url": "http://h", **kwargs})


class TestLimits:
    async def test_no_more_requests_run_at_a_time_than_may(self):
        async with serving(lambda body: (200, says("Score: 1")), delay_s=0.02) as service:
            reward = made("judge", service.url, limits={"max_concurrent": 2}, model="m")
            await reward.score([episode()] * 8)
        assert service.most == 2

    async def test_a_busy_service_is_asked_again(self):
        answers = [(503, {"error": "busy"}), (200, says("Score: 10"))]
        async with serving(lambda body: answers.pop(0)) as service:
            assert values(await made("judge", service.url, model="m").score([episode()])) == [1.0]

    async def test_a_refused_request_is_not_repeated(self):
        async with serving(lambda body: (400, {"error": "no such model"})) as service:
            with pytest.raises(RewardError, match=r"reward judge: .*400: no such model"):
                await made("judge", service.url, model="m").score([episode()])
        assert len(service.requests) == 1

    async def test_a_service_that_stays_away_fails_its_group_by_name(self):
        url = f"http://127.0.0.1:{free_port()}"
        reward = made("judge", url, limits={"retries": 1, "name": "helpful"}, model="m")
        with pytest.raises(RewardError, match=rf"reward helpful \(judge\): {url}.*tried 2 times"):
            await reward.score([episode()])

    async def test_a_service_that_does_not_answer_is_given_up(self):
        limits = {"retries": 0, "timeout_s": 0.05}
        async with serving(lambda body: (200, {}), delay_s=30) as service:
            with pytest.raises(RewardError, match=r"judge has not answered within timeout_s"):
                await made("judge", service.url, limits=limits, model="m").score([episode()])


class TestHttp:
    async def test_siblings_are_scored_by_one_request(self):
        answer = {"rewards": [1, 0.5], "metrics": [{"helpful": 3}, {"helpful": 4}]}
        async with serving(lambda body: (200, answer)) as service:
            first, second = await made("http", f"{service.url}/score").score(
                [episode("a", level=2), episode("b", level=2)]
            )
        assert first == Score(1.0, {"reward/http": 1.0, "reward/http/helpful": 3.0})
        assert second.reward == 0.5
        ((path, _, body),) = service.requests
        assert path == "/score"
        sent = body["episodes"][0]
        assert (sent["response"], sent["answer"], sent["row"]) == ("a", "42", {"level": 2})
        assert sent["messages"][-1] == {"role": "assistant", "content": "a"}

    @pytest.mark.parametrize(
        ("answer", "sentence"),
        [
            ({"rewards": [1]}, r"returned \[.*it must return 2 finite numbers"),
            ({"rewards": ["much", 1]}, "unexpected answer"),
            ({"rewards": [1, 1], "metrics": [{}]}, "answered 2 rewards and 1 metrics"),
        ],
    )
    async def test_nonsense_fails_the_group(self, answer, sentence):
        async with serving(lambda body: (200, answer)) as service:
            reward = made("http", service.url, limits={"retries": 0})
            with pytest.raises(RewardError, match=f"reward http.*{sentence}"):
                await reward.score([episode(), episode()])


def ran(stdout: str | None, code: int = 0):
    status = "Success" if code == 0 else "Failed"
    run = {"status": "Finished", "execution_time": 0.1, "return_code": code, "stdout": stdout}
    return 200, {"status": status, "message": "", "compile_result": None, "run_result": run}


TESTS = {"ground_truth": '{"inputs": ["1\\n", "2\\n"], "outputs": ["2\\n", "4\\n"]}'}


class TestSandboxFusion:
    async def score(self, answer, path: str = "", **kwargs: object):
        async with serving(answer) as service:
            limits = {"retries": 0}
            reward = made("sandbox_fusion", f"{service.url}{path}", limits=limits, **kwargs)
            (score,) = await reward.score([episode("```python\nx\n```", reward_model=TESTS)])
        return score.reward, service.requests

    async def test_each_test_is_a_request(self):
        reward, requests = await self.score(lambda body: ran(str(2 * int(body["stdin"]))))
        assert reward == 1.0
        assert [(path, body["stdin"]) for path, _, body in requests] == [
            ("/run_code", "1\n"),
            ("/run_code", "2\n"),
        ]
        body = requests[0][2]
        assert (body["language"], body["run_timeout"]) == ("python", 10.0)
        assert body["code"].endswith("x\n")

    async def test_the_whole_address_of_verls_setting_will_do(self):
        _, requests = await self.score(lambda body: ran("2"), path="/run_code")
        assert requests[0][0] == "/run_code"

    async def test_the_first_failure_ends_the_tests_unless_the_share_counts(self):
        reward, requests = await self.score(lambda body: ran("", code=1))
        assert (reward, len(requests)) == (0.0, 1)
        reward, requests = await self.score(lambda body: ran("2"), partial=True)
        assert (reward, len(requests)) == (0.5, 2)

    async def test_python_tests_are_run_by_the_same_harness(self):
        tests = {"ground_truth": "def test_x():\n    assert x() == 1"}

        async def rewarded(said: str) -> float:
            def answer(body):
                job = json.loads(body["stdin"])
                assert "x\n" in job["program"]
                return ran(said.replace("MARK", job["mark"]))

            async with serving(answer) as service:
                reward = made("sandbox_fusion", service.url)
                (score,) = await reward.score([episode("```python\nx\n```", reward_model=tests)])
            return score.reward

        assert await rewarded("noise\nMARKpassed 1 of 1\n") == 1.0
        assert await rewarded("noise\nMARKpassed 0 of 1\n") == 0.0
        assert await rewarded("\npassed 1 of 1\n") == 0.0

    async def test_what_the_service_lacks_and_rows_without_tests_fail_the_group_at_once(self):
        async with serving(
            lambda body: ran(f"\n{json.loads(body['stdin'])['mark']}missing pytest\n")
        ) as service:
            reward = made("sandbox_fusion", service.url)
            with pytest.raises(RewardError, match="its tests need pytest, which the Python"):
                await reward.score([episode("x", test="import pytest\nassert x() == 1")])
            with pytest.raises(RewardError, match="sandbox_fusion: the row: the answer was '42'"):
                await reward.score([episode("x")])
        assert len(service.requests) == 1

    async def test_an_error_of_the_sandbox_fails_the_group(self):
        error = {"status": "SandboxError", "message": "out of disk"}
        with pytest.raises(RewardError, match=r"sandbox_fusion: .*SandboxError: out of disk"):
            await self.score(lambda body: (200, error))
