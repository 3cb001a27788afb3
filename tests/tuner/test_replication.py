"""Whether copies pay, as the reference simulator sees it."""

from dataclasses import replace

import numpy as np
import pytest

from engines.types import Role
from tests.support.traffic import engine_states, traffic
from tuner.candidates import explicit_knobs, plan_of, split
from tuner.plan import BOOTSTRAP_PLAN
from tuner.replication import worth_copying
from tuner.slo import Slo, SloTable
from tuner.task import SearchTask
from tuner.types import HotContext

FLEET = engine_states(4)
ROOTS = 4
HOT = [HotContext(prefix=f"{root + 1:016x}", blocks=64, requests=50, share=0.25, tokens=8192) for root in range(ROOTS)]
STRICT = SloTable(classes={"default": Slo(ttft_ms=500, tpot_ms=100)})
LENIENT = SloTable(classes={"default": Slo(ttft_ms=60_000, tpot_ms=1000)})


def demand(root_tokens=16_000):
    """Requests that begin with one of four documents."""
    independent = traffic(15.0, rate_rps=12.0, prompt_tokens=300, output_tokens=40)
    root = np.random.default_rng(3).integers(ROOTS, size=len(independent))
    return replace(
        independent,
        prompt_tokens=independent.prompt_tokens + root_tokens,
        root=root,
        root_tokens=np.full(len(independent), root_tokens),
    )


def task(**given):
    return SearchTask(**({"workload": demand(), "engines": FLEET, "slos": STRICT, "plan": BOOTSTRAP_PLAN} | given))


@pytest.fixture(scope="module")
def copied():
    return worth_copying(task(hot=HOT))


def test_copies_pay_where_each_engine_would_have_to_prefill_long_documents_first(copied):
    assert [each.prefix for each in copied] == [each.prefix for each in HOT]
    assert {each.engines for each in copied} == {("e0", "e1", "e2", "e3")}
    assert {each.blocks for each in copied} == {64}


def test_copies_do_not_pay_where_everything_is_good_without():
    assert worth_copying(task(hot=HOT, slos=LENIENT)) == ()


def test_what_the_plan_has_copied_already_is_not_asked_for_again(copied):
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": copied})
    assert worth_copying(task(hot=HOT, plan=plan)) == ()


def test_only_what_is_new_is_asked_for(copied):
    plan = BOOTSTRAP_PLAN.model_copy(update={"replicas": copied[:1]})
    asked = task(hot=HOT, plan=plan, workload=demand(24_000))
    assert [each.prefix for each in worth_copying(asked)] == [each.prefix for each in HOT[1:]]


def test_nothing_is_asked_without_hot_contexts_or_a_second_engine_that_decodes():
    assert worth_copying(task()) == ()
    roles = plan_of(split(4, 3, 0.0, explicit_knobs(FLEET)), FLEET)
    assert list(roles.roles.values()).count(Role.DECODE) == 1
    assert worth_copying(task(hot=HOT, plan=roles)) == ()
