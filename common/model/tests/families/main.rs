//! What families make of a `config.json`: every reference model in every spelling, the production models, variants of
//! each, and what is refused. Descriptions alone; what the layers compute is for other tests.

mod experts;
mod fixtures;
mod keys;
mod layers;
mod production;
mod recurrent;
mod rotation;
mod spellings;
mod support;
