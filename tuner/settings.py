"""What an operator may turn about the tuner itself. The defaults are what the benchmarks are run with."""

from pydantic import BaseModel, ConfigDict, Field


class TunerSettings(BaseModel):
    """Frozen and validated; every duration in seconds."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_requests: int = Field(default=15, ge=5, description="Requests of the present traffic before anything is tried")
    min_gain: float = Field(default=0.015, ge=0, le=1, description="Least relative gain that is worth a change")
    confidence_z: float = Field(default=2.5, ge=0, description="Standard errors that a gain must exceed")
    dwell_s: float = Field(default=45.0, ge=0, description="Least time between two changes while nothing moves")
    settle_s: float = Field(default=15.0, ge=0, description="After a change, requests that still ran in its wake")
    probation_s: float = Field(default=60.0, ge=0, description="How long a new plan is watched for its promise")
    probation_margin: float = Field(default=0.1, ge=0, le=1, description="Relative shortfall that is still forgiven")
    barred_s: float = Field(default=900.0, ge=0, description="How long a plan that broke its promise is left alone")
    search_every_s: float = Field(default=30.0, ge=0, description="Between searches while nothing moves")
    transient_s: float = Field(default=60.0, ge=0, description="After a shift: search every tick, dwell shortened")
    transient_dwell_s: float = Field(default=15.0, ge=0, description="Least time between two changes after a shift")
    horizon_s: float = Field(default=60.0, gt=0, description="Traffic that counts of what one simulation replays")
    max_simulated_requests: int = Field(default=6000, ge=100, description="Bound on one simulation")
    replicas: int = Field(default=3, ge=2, description="Bootstrapped workloads that finalists are compared on")
    finalists: int = Field(default=4, ge=1, description="Candidates that are compared on all replicas")
    trials: int = Field(default=60, ge=1, description="Candidates a search looks at")
    budget_s: float = Field(default=2.0, gt=0, description="CPU time of one search")
    window_s: float = Field(default=300.0, gt=0, description="Most traffic that is looked back on")
    seed: int = 1
