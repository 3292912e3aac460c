//! The front over a scripted engine: HTTP and gRPC as clients see them, and what reaches the engine.

mod fake;
mod grpc;
mod grpc_services;
mod http;
mod lifecycle;
mod prompts;
mod refusals;
