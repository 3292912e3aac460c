//! The program as a user runs it: arguments in; standard output, standard error and the exit code out.

mod golden;
mod info;
mod roles;
mod support;
mod text;
mod usage;
