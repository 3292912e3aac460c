//! The roles' settings, layer over layer, and what is refused before anything is loaded.

use std::process::Command;

use crate::support::{Files, Run, fails};

const ROLES: [&str; 3] = ["router", "scatter-worker", "combiner"];

/// Run the program with these variables in its environment.
fn hypic_in(environment: &[(&str, &str)], args: &[&str]) -> Run {
    let output = Command::new(env!("CARGO_BIN_EXE_hypic"))
        .args(args)
        .envs(environment.iter().copied())
        .output()
        .expect("the program starts");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("output in UTF-8");
    Run { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

#[track_caller]
fn printed(environment: &[(&str, &str)], args: &[&str]) -> String {
    let run = hypic_in(environment, args);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{args:?}");
    run.stdout
}

#[test]
fn a_flag_wins_over_the_environment_and_that_over_the_file() {
    let files = Files::new();
    let file =
        files.write("hypic.toml", "[cache]\nbytes = \"1MiB\"\n[shutdown]\ngrace = \"7s\"\n[worker]\nthreads = 3\n");
    let environment = [("HYPIC__CACHE__BYTES", "2MiB"), ("HYPIC__WORKER__THREADS", "4")];
    let args = ["scatter-worker", "--config", &file, "--threads", "5", "--print-config"];
    let settings = printed(&environment, &args);
    for line in ["bytes = \"2.0 MiB\"", "threads = 5", "grace = \"7s\""] {
        assert!(settings.contains(line), "{line} is not in:\n{settings}");
    }
    // What is printed is a file that gives the same.
    let again = files.write("again.toml", &settings);
    assert_eq!(printed(&[], &["scatter-worker", "--config", &again, "--print-config"]), settings);
}

/// A Service named hypic-router puts such variables into every pod.
#[test]
fn variables_of_kubernetes_do_no_harm() {
    let environment = [("HYPIC_ROUTER_PORT", "tcp://10.0.0.1:80"), ("HYPIC_ROUTER_SERVICE_HOST", "10.0.0.1")];
    for role in ROLES {
        let members = ["--members", "combiner=127.0.0.1:1"];
        let args = [&[role, "--print-config"][..], &members].concat();
        assert_eq!(printed(&environment, &args), printed(&[], &args));
    }
}

#[test]
fn unknown_keys_are_refused_with_where_they_stand() {
    let files = Files::new();
    let file = files.write("bad.toml", "[cache]\nbites = 3\n");
    fails(1, &["combiner", "--config", &file], &["bad.toml", "bites"]);
    fails(1, &["combiner", "--config", "nowhere.toml"], &["nowhere.toml"]);
    fails(1, &["combiner", "--set", "cache.bites=3"], &["cache.bites=3", "bites", "bytes"]);
    let run = hypic_in(&[("HYPIC__CACHE__BITES", "3")], &["combiner"]);
    assert_eq!(run.code, Some(1));
    assert!(run.stderr.contains("HYPIC__CACHE__BITES"), "{}", run.stderr);
}

#[test]
fn settings_that_cannot_work_are_named() {
    fails(1, &["router"], &["--members", "--etcd"]);
    fails(1, &["combiner", "--seam", "3"], &["--seam", "combiner"]);
    fails(1, &["router", "--members", "combiner=nowhere"], &["combiner=nowhere", "HOST:PORT"]);
    fails(1, &["router", "--members", "worker=127.0.0.1:1"], &["worker=127.0.0.1:1", "scatter-worker"]);
    fails(1, &["combiner", "--dtype", "f64"], &["f64", "bf16"]);
    fails(1, &["combiner", "--set", "combiner.max_sequences=0"], &["combiner.max_sequences", "at least 1"]);
    let open = ["combiner", "--listen", "0.0.0.0:0", "--metrics-listen", "127.0.0.1:0"];
    fails(1, &open, &["0.0.0.0:0", "TLS", "--insecure"]);
}
