//! Good and bad checkpoints: what is loaded gives the numbers that its files mean, what is refused is refused by
//! name, and nothing in a file can make the program panic or ask for absurd memory.

mod config;
mod docs;
mod files;
mod fp8;
mod ranges;
mod rope;
mod shapes;
mod sizes;
mod support;
mod tensors;
