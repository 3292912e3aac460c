//! The router: what stands between clients and the roles that compute. The front ([`bind`],
//! [`Front::serve`]) speaks HTTP and gRPC and turns both into the types of the API ([`Request`] in,
//! [`Event`]s out) over whatever implements [`Engine`]; the [`Balancer`] says which worker prefills what.
#![forbid(unsafe_code)]

mod answer;
mod api;
mod auth;
mod balance;
mod breaker;
mod budget;
mod directory;
mod faults;
mod fleet;
mod flights;
mod front;
mod grpc;
mod http;
mod plan;
mod router;
mod running;
mod stats;
#[cfg(test)]
mod testing;
mod validate;

pub use api::{
    Anchor, Answer, Delta, Engine, Error, ErrorKind, Event, FinishReason, Message, Mode, ModelCard, Part, Progress,
    Prompt, PromptOptions, Report, Request, Sampling, SegmentReport, SegmentSource, Timings, TokenLogprob,
    TokenLogprobs, Usage,
};
pub use auth::{ApiKeys, KeyFileError};
pub use balance::{Assignment, BalanceError, Balancer, Charge, LinkConfig, Speed, SpeedConfig, WorkerId, WorkerLoad};
pub use faults::FaultConfig;
pub use fleet::{Fleet, View};
pub use front::{BindError, Front, FrontConfig, FrontLimits, bind};
pub use plan::{PlanCosts, PlanTimes, ReplicateConfig};
pub use router::{Router, RouterConfig, Served};
pub use validate::{MAX_ANSWERS, MAX_LOGPROBS, MAX_STOPS, validate};
