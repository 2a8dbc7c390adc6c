"""Questions to the accountant, checks of certificates, and the public models. No ledger is read."""

from __future__ import annotations

from fastapi import APIRouter

from accounting.errors import InvalidMechanism
from accounting.mechanisms import Mechanism, mechanism_from_json
from api import schemas
from api.bodies import ServiceRoute
from api.deps import ServiceDep
from worker.catalogue import list_models

router = APIRouter(route_class=ServiceRoute, tags=["accounting"])


def _mechanism(obj: object) -> Mechanism:
    try:
        return mechanism_from_json(obj)
    except InvalidMechanism as error:
        raise error.within("mechanism") from None


@router.post(
    "/v1/accounting/epsilon", operation_id="compute_epsilon", response_model=schemas.Bracket
)
def compute_epsilon(body: schemas.EpsilonRequest, service: ServiceDep) -> object:
    """The bracket of a mechanism's epsilon at a delta; its upper end is the certificate."""
    return service.accountant.epsilon(_mechanism(body.mechanism), body.delta).to_json()


@router.post(
    "/v1/accounting/delta", operation_id="compute_delta", response_model=schemas.DeltaBracket
)
def compute_delta(body: schemas.DeltaRequest, service: ServiceDep) -> object:
    """The bracket of a mechanism's delta at an epsilon; its upper end is the certificate."""
    return service.accountant.delta(_mechanism(body.mechanism), body.epsilon).to_json()


@router.post(
    "/v1/accounting/profile", operation_id="compute_profile", response_model=schemas.Profile
)
def compute_profile(body: schemas.ProfileRequest, service: ServiceDep) -> object:
    """The curve of delta over epsilon, both bounds at each point."""
    points = service.accountant.profile(_mechanism(body.mechanism), body.epsilons)
    return {"points": [point.to_json() for point in points]}


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
