//! Where the program under test and its models are. What can go wrong: the program was never built; that is told with
//! the command that builds it.

use std::path::{Path, PathBuf};

/// The program: `HYPIC_BIN`, or `hypic` in the folder of the build that this test belongs to.
///
/// # Panics
/// If it is not there.
pub fn executable() -> PathBuf {
    if let Some(path) = std::env::var_os("HYPIC_BIN") {
        let path = PathBuf::from(path);
        assert!(path.is_file(), "HYPIC_BIN names {}, which is no file", path.display());
        return path;
    }
    let test = std::env::current_exe().expect("the path of this test");
    // target/debug/deps/TEST
    let path = test.ancestors().nth(2).expect("a folder of the build").join("hypic");
    assert!(path.is_file(), "{} is missing: cargo build -p hypic --bin hypic, or set HYPIC_BIN", path.display());
    path
}

/// The folder of the demo model.
pub fn demo_model() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo")
}

/// A copy of the demo model below `folder` that differs in one byte of its tensors: it loads, and has another
/// fingerprint.
///
/// # Panics
/// If there is no room for it.
pub fn model_with_another_tensor(folder: &Path) -> PathBuf {
    let to = folder.join("another-model");
    std::fs::create_dir(&to).expect("room for a model");
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(demo_model().join(file), to.join(file)).expect("room for a model");
    }
    let mut weights = std::fs::read(demo_model().join("model.safetensors")).expect("the demo model's weights");
    // The lowest bit of a mantissa near the end of the data.
    let at = weights.len() - 2;
    weights[at] ^= 1;
    std::fs::write(to.join("model.safetensors"), weights).expect("room for a model");
    to
}
