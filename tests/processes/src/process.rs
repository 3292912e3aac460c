//! One running process: its lines, its log, signals, its end. What can go wrong: a test that fails in the middle; a
//! process ends with its guard in any case, and its log is printed if the test is failing.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hypic_test_support::until;
use rustix::process::{Pid, kill_process, test_kill_process};
use serde_json::Value;

pub use rustix::process::Signal;

/// Lines of the log that a failing test prints.
const LOG_LINES: usize = 400;
/// What a process gets to end after SIGTERM when its guard is dropped.
const DROP_GRACE: Duration = Duration::from_secs(12);

/// A child of this test. Dropping it terminates it, kills it if that does not help, and reaps it.
#[derive(Debug)]
pub struct Process {
    name: String,
    child: Child,
    lines: Arc<Mutex<Vec<Value>>>,
    log: Arc<Mutex<Vec<String>>>,
}

impl Process {
    /// Start `program`; its standard output must be JSON objects, one a line, and its standard error is its log.
    ///
    /// # Panics
    /// If it does not start.
    pub fn start(name: &str, program: &Path, arguments: &[String], environment: &[(String, String)]) -> Process {
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        if !environment.iter().any(|(key, _)| key == "RUST_LOG") {
            command.env_remove("RUST_LOG");
        }
        command.envs(environment.iter().map(|(key, value)| (key, value)));
        let mut child = command.spawn().unwrap_or_else(|why| panic!("{}: {why}", program.display()));
        let (lines, log) = <(Arc<Mutex<Vec<Value>>>, Arc<Mutex<Vec<String>>>)>::default();
        let (to, complaints) = (lines.clone(), log.clone());
        read(child.stdout.take().expect("a pipe"), move |line| match serde_json::from_str(&line) {
            Ok(value) => to.lock().expect("no panic").push(value),
            Err(_) => complaints.lock().expect("no panic").push(format!("NOT JSON ON STANDARD OUTPUT: {line}")),
        });
        let to = log.clone();
        read(child.stderr.take().expect("a pipe"), move |line| to.lock().expect("no panic").push(line));
        Process { name: name.to_string(), child, lines, log }
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The objects that it has printed so far.
    pub fn lines(&self) -> Vec<Value> {
        self.lines.lock().expect("no panic").clone()
    }

    /// What it and its children have logged so far.
    pub fn log(&self) -> String {
        self.log.lock().expect("no panic").join("\n")
    }

    /// The first of its lines that `wanted` takes, waiting for it.
    ///
    /// # Panics
    /// If it does not come within `limit`, or the process ends before.
    pub async fn line(&mut self, limit: Duration, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let what = format!("{what}, from {}", self.name);
        until(limit, &what, async || {
            let found = self.lines().into_iter().find(&wanted);
            if found.is_none()
                && let Some(status) = self.ended()
            {
                panic!("{what}: it ended with {status}\n{}", self.log());
            }
            found
        })
        .await
    }

    /// How it ended, if it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("a child")
    }

    /// Wait for its end.
    ///
    /// # Panics
    /// If it is still there after `limit`.
    pub async fn end(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        until(limit, &what, async || self.ended()).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.ended().is_none() {
            signal(self.pid(), Signal::CONT);
            signal(self.pid(), Signal::TERM);
            let began = Instant::now();
            while self.ended().is_none() && began.elapsed() < DROP_GRACE {
                std::thread::sleep(Duration::from_millis(10));
            }
            if self.ended().is_none() {
                eprintln!("{} did not end within {DROP_GRACE:?} of SIGTERM", self.name);
                for child in children(self.pid()) {
                    signal(child, Signal::KILL);
                }
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
        if std::thread::panicking() {
            let log = self.log.lock().expect("no panic");
            eprintln!("---- log of {}", self.name);
            for line in &log[log.len().saturating_sub(LOG_LINES)..] {
                eprintln!("{line}");
            }
        }
    }
}

/// Hand every line to `take`, on a thread that ends with the pipe.
fn read(pipe: impl Read + Send + 'static, take: impl Fn(String) + Send + 'static) {
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n') {
            let Ok(line) = line else { return };
            take(String::from_utf8_lossy(&line).into_owned());
        }
    });
}

fn pid(of: u32) -> Option<Pid> {
    Pid::from_raw(i32::try_from(of).ok()?)
}

/// Send a signal; a process that is gone is no failure.
pub fn signal(of: u32, signal: Signal) {
    if let Some(pid) = pid(of) {
        let _ = kill_process(pid, signal);
    }
}

/// Whether a process is there and no zombie.
pub fn alive(of: u32) -> bool {
    let exists = pid(of).is_some_and(|pid| test_kill_process(pid).is_ok());
    exists && stat(of).is_some_and(|(_, state, _)| state != 'Z')
}

/// The processes that `parent` has started and that still run.
pub fn children(parent: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").expect("a system with /proc");
    let pids = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    pids.filter(|&pid| stat(pid).is_some_and(|(_, state, of)| of == parent && state != 'Z')).collect()
}

/// Name of the program that a process runs.
pub(crate) fn command(of: u32) -> Option<String> {
    stat(of).map(|(name, ..)| name)
}

/// Name, state and parent.
fn stat(of: u32) -> Option<(String, char, u32)> {
    let text = std::fs::read_to_string(format!("/proc/{of}/stat")).ok()?;
    let (start, rest) = text.rsplit_once(')')?;
    let name = start.split_once('(')?.1.to_string();
    let mut fields = rest.split_whitespace();
    Some((name, fields.next()?.chars().next()?, fields.next()?.parse().ok()?))
}
