"""Questions to the accountant, checks of certificates, and the public models. No ledger is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter
from starlette.concurrency import run_in_threadpool

from accounting import calibrate
from accounting.bounds import Limits
from accounting.calibrate import Stage
from accounting.errors import InvalidMechanism
from accounting.mechanisms import Mechanism, mechanism_from_json
from api import questions, schemas
from api.bodies import ServiceRoute
from api.deps import Service, ServiceDep
from worker.catalogue import list_models

router = APIRouter(route_class=ServiceRoute, tags=["accounting"])
T = TypeVar("T")


async def _ask(service: Service, question: Callable[[Limits], T]) -> T:
    """Reads and answers a question in one trip to a thread.

    Each trip costs a known question more than its answer does. A plain function as a route would
    make a second one, for the reply's form alone.
    """
    return await run_in_threadpool(service.accountant.ask, question)


def _mechanism(obj: object, *, free: str | None = None, where: str = "mechanism") -> Mechanism:
    """The mechanism in a body; the parameter that is asked for may be left out of it."""
    try:
        return mechanism_from_json(obj) if free is None else calibrate.read(obj, free)
    except InvalidMechanism as error:
        raise error.within(where) from None


@router.post(
    "/v1/accounting/epsilon", operation_id="compute_epsilon", response_model=schemas.Bracket
)
async def compute_epsilon(body: schemas.EpsilonRequest, service: ServiceDep) -> object:
    """The bracket of a mechanism's epsilon at a delta; its upper end is the certificate."""
    return await _ask(
        service,
        lambda limits: questions.ask_epsilon(
            _mechanism(body.mechanism), body.delta, body.tolerance, limits
        ),
    )


@router.post(
    "/v1/accounting/delta", operation_id="compute_delta", response_model=schemas.DeltaBracket
)
async def compute_delta(body: schemas.DeltaRequest, service: ServiceDep) -> object:
    """The bracket of a mechanism's delta at an epsilon; its upper end is the certificate."""
    return await _ask(
        service,
        lambda limits: questions.ask_delta(_mechanism(body.mechanism), body.epsilon, limits),
    )


@router.post(
    "/v1/accounting/profile", operation_id="compute_profile", response_model=schemas.Profile
)
async def compute_profile(body: schemas.ProfileRequest, service: ServiceDep) -> object:
    """The curve of delta over epsilon, both bounds at each point."""
    return await _ask(
        service,
        lambda limits: questions.ask_profile(_mechanism(body.mechanism), body.epsilons, limits),
    )


@router.post(
    "/v1/accounting/tradeoff", operation_id="compute_tradeoff", response_model=schemas.Tradeoff
)
async def compute_tradeoff(body: schemas.TradeoffRequest, service: ServiceDep) -> object:
    """The smallest type II error of any membership test by its type I error, both bounds."""
    return await _ask(
        service,
        lambda limits: questions.ask_tradeoff(_mechanism(body.mechanism), body.alphas, limits),
    )


@router.post(
    "/v1/accounting/compare", operation_id="compare_methods", response_model=schemas.Comparisons
)
def compare_methods(body: schemas.CompareRequest, service: ServiceDep) -> object:
    """The same question by every method, with what each proves and how long it took."""
    return service.accountant.compare(_mechanism(body.mechanism), body.delta)


@router.post(
    "/v1/accounting/calibrate",
    operation_id="calibrate_mechanism",
    response_model=schemas.Calibration,
)
async def calibrate_mechanism(body: schemas.CalibrateRequest, service: ServiceDep) -> object:
    """The parameter of a mechanism that meets a target best; it may be left out of the mechanism.

    `free` is its path in the mechanism, or `delta` for the delta at the target's epsilon.
    """
    target = body.target
    return await _ask(
        service,
        lambda limits: questions.ask_calibrate(
            _mechanism(body.mechanism, free=body.free),
            body.free,
            target.epsilon,
            target.delta,
            body.method,
            limits,
        ),
    )


@router.post(
    "/v1/accounting/allocate", operation_id="allocate_target", response_model=schemas.Allocation
)
async def allocate_target(body: schemas.AllocateRequest, service: ServiceDep) -> object:
    """The noise of each stage, so that all of them together meet a target by their weights."""
    target = body.target

    def answer(limits: Limits) -> object:
        stages = [
            Stage(
                _mechanism(
                    stage.mechanism, free="noise_multiplier", where=f"stages[{i}].mechanism"
                ),
                stage.weight,
            )
            for i, stage in enumerate(body.stages)
        ]
        return questions.ask_allocate(stages, target.epsilon, target.delta, body.method, limits)

    return await _ask(service, answer)


@router.post(
    "/v1/certificates/verify",
    operation_id="verify_certificate",
    response_model=schemas.CertificateCheck,
)
def verify_certificate(body: schemas.VerifyRequest, service: ServiceDep) -> object:
    """Checks a certificate's signature and, from its mechanism alone, its bound."""
    return service.accountant.check(
        body.certificate, service.public_keys, recompute=body.recompute
    ).to_json()


@router.get("/v1/models", operation_id="list_models", response_model=schemas.PublicModels)
def get_models(service: ServiceDep) -> object:
    """The public models that jobs may name, with their data, licences and digests."""
    return {
        "models": [
            {
                "name": model.name,
                "shape": list(model.shape),
                "classes": None if model.classes is None else list(model.classes),
                "sha256": model.sha256,
                "licence": model.licence,
                "training_data": model.training_data,
            }
            for model in list_models(service.settings.public_models)
        ]
    }
