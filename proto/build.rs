//! Compiles the protocol with a pure Rust compiler: nothing has to be installed.

use std::path::PathBuf;
use std::{env, error, fs};

use prost::Message;

const ROOT: &str = ".";
const FILES: [&str; 2] = ["hypic/v1/inference.proto", "hypic/v1/internal.proto"];

fn main() -> Result<(), Box<dyn error::Error>> {
    println!("cargo::rerun-if-changed=hypic");
    let descriptors = protox::compile(FILES, [ROOT])?;
    let out = PathBuf::from(env::var("OUT_DIR")?);
    fs::write(out.join("hypic_v1.bin"), descriptors.encode_to_vec())?;
    tonic_prost_build::configure().bytes(".").compile_fds(descriptors)?;
    Ok(())
}
