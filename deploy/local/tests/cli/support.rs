//! Running the program, and files for it.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

/// A path below the repository's tests folder.
pub fn repository(relative: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests").join(relative);
    path.to_str().expect("a path in UTF-8").to_string()
}

pub struct Run {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// Run the program in an empty directory.
pub fn hypic(args: &[&str]) -> Run {
    let empty = tempfile::tempdir().expect("room on disk");
    let output = Command::new(env!("CARGO_BIN_EXE_hypic"))
        .args(args)
        .current_dir(empty.path())
        .env_remove("RUST_LOG")
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output in UTF-8");
    Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// Run it and read one JSON object a line; nothing may be on standard error.
#[track_caller]
pub fn answers(args: &[&str]) -> Vec<Value> {
    let run = hypic(args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    run.stdout.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect()
}

/// The only answer.
#[track_caller]
pub fn answer(args: &[&str]) -> Value {
    let mut answers = answers(args);
    assert_eq!(answers.len(), 1, "{args:?}");
    answers.remove(0)
}

/// The program fails with `code`, says why on standard error, in all of `words`, and nothing on standard output.
#[track_caller]
pub fn fails(code: i32, args: &[&str], words: &[&str]) {
    let run = hypic(args);
    assert_eq!(run.code, Some(code), "{args:?}: {}", run.stderr);
    assert_eq!(run.stdout, "", "{args:?}");
    assert!(run.stderr.starts_with("error: "), "{args:?}: {}", run.stderr);
    for word in words {
        assert!(run.stderr.contains(word), "{args:?}: {word:?} is not in: {}", run.stderr);
    }
}

/// Files for one test.
pub struct Files(TempDir);

impl Files {
    pub fn new() -> Self {
        Files(tempfile::tempdir().expect("room on disk"))
    }

    /// Write a file and give its path.
    pub fn write(&self, name: &str, bytes: impl AsRef<[u8]>) -> String {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).expect("room on disk");
        path.to_str().expect("a path in UTF-8").to_string()
    }

    /// A copy of a checkpoint of the repository, in a folder of its own.
    pub fn copy_of(&self, relative: &str) -> PathBuf {
        let to = self.0.path().join("checkpoint");
        std::fs::create_dir(&to).expect("room on disk");
        for file in std::fs::read_dir(repository(relative)).expect("a checkpoint") {
            let file = file.expect("a checkpoint");
            if file.file_type().expect("a checkpoint").is_file() {
                std::fs::copy(file.path(), to.join(file.file_name())).expect("room on disk");
            }
        }
        to
    }

    pub fn path(&self) -> &str {
        self.0.path().to_str().expect("a path in UTF-8")
    }
}

/// The four kinds of prompt tokens add up, and no segment is reused beyond its length.
#[track_caller]
pub fn assert_adds_up(answer: &Value) {
    let usage = |key: &str| answer["usage"][key].as_u64().expect("a count");
    let parts = ["exact_tokens", "composed_tokens", "seam_tokens", "computed_tokens"];
    assert_eq!(parts.into_iter().map(usage).sum::<u64>(), usage("prompt_tokens"), "{answer}");
    assert_eq!(usage("completion_tokens"), answer["token_ids"].as_array().expect("ids").len() as u64);
    let segments = answer["segments"].as_array().expect("segments");
    let reused = segments.iter().map(|s| s["reused"].as_u64().expect("a count"));
    for (segment, reused) in segments.iter().zip(reused.clone()) {
        assert!(reused <= segment["tokens"].as_u64().expect("a count"), "{segment}");
    }
    assert!(reused.sum::<u64>() <= usage("exact_tokens") + usage("composed_tokens"), "{answer}");
}
