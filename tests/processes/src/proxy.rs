//! A faulty network: forwards TCP connections from an address of its own to another one, with a fault per direction
//! that can be switched while they run. What can go wrong: a fault that never met a byte proves nothing; compare the
//! counts.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// Bytes that are read at a time.
const CHUNK: usize = 16 * 1024;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From those that dial the proxy.
    Forth,
    /// Back to them.
    Back,
}

/// What happens to the bytes of a direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// They pass.
    None,
    /// Every piece waits that long.
    Delay(Duration),
    /// They wait until another fault is set, however many come.
    Hold,
    /// They vanish.
    Drop,
    /// Every piece comes twice.
    Duplicate,
    /// Connections are reset, new ones too.
    Cut,
    /// So many bytes pass, then their connection is reset: once.
    CutAfter(u64),
    /// So many bytes pass, then a bit of the next one is turned: once.
    FlipAfter(u64),
}

/// A proxy in front of one address. Dropping it resets its connections.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    forth: Arc<Way>,
    back: Arc<Way>,
    _accepting: JoinSet<()>,
}

#[derive(Debug)]
struct Way {
    fault: watch::Sender<Fault>,
    received: AtomicU64,
    sent: AtomicU64,
}

impl Way {
    fn new() -> Arc<Way> {
        let (received, sent) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Way { fault: watch::Sender::new(Fault::None), received, sent })
    }
}

impl Proxy {
    /// Listen on a free loopback port and forward to `target`, HOST:PORT.
    ///
    /// # Panics
    /// If there is no free port.
    pub async fn to(target: &str) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (forth, back, target) = (Way::new(), Way::new(), target.to_string());
        let mut accepting = JoinSet::new();
        accepting.spawn(accept(listener, target, forth.clone(), back.clone()));
        Proxy { address, forth, back, _accepting: accepting }
    }

    /// HOST:PORT to dial.
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// What happens to a direction's bytes from now on.
    pub fn set(&self, direction: Direction, fault: Fault) {
        self.way(direction).fault.send_replace(fault);
    }

    /// The fault of a direction; one that happens once is [`Fault::None`] again afterwards.
    pub fn fault(&self, direction: Direction) -> Fault {
        *self.way(direction).fault.borrow()
    }

    /// Bytes that came in on a direction, whatever became of them.
    pub fn received(&self, direction: Direction) -> u64 {
        self.way(direction).received.load(Ordering::SeqCst)
    }

    /// Bytes that left on a direction.
    pub fn sent(&self, direction: Direction) -> u64 {
        self.way(direction).sent.load(Ordering::SeqCst)
    }

    fn way(&self, direction: Direction) -> &Way {
        match direction {
            Direction::Forth => &self.forth,
            Direction::Back => &self.back,
        }
    }
}

async fn accept(listener: TcpListener, target: String, forth: Arc<Way>, back: Arc<Way>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((dialled, _)) = listener.accept().await else { continue };
        connections.spawn(forward(dialled, target.clone(), forth.clone(), back.clone()));
        while connections.try_join_next().is_some() {}
    }
}

/// One connection, until both directions ended or one is cut.
async fn forward(dialled: TcpStream, target: String, forth: Arc<Way>, back: Arc<Way>) {
    // Dropped without a word, a socket sends a reset: that is what a cut and a missing target look like.
    let _ = dialled.set_zero_linger();
    let Ok(onward) = TcpStream::connect(&target).await else { return };
    let _ = (onward.set_zero_linger(), onward.set_nodelay(true), dialled.set_nodelay(true));
    let ((dialled_in, dialled_out), (onward_in, onward_out)) = (dialled.into_split(), onward.into_split());
    let one = pump(dialled_in, onward_out, &forth);
    let other = pump(onward_in, dialled_out, &back);
    let _ = tokio::try_join!(one, other);
}

/// The connection is to be reset.
struct Reset;

async fn pump(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, way: &Way) -> Result<(), Reset> {
    let mut fault = way.fault.subscribe();
    let mut buffer = vec![0; CHUNK];
    loop {
        let read = tokio::select! {
            read = from.read(&mut buffer) => read.map_err(|_| Reset)?,
            _ = fault.wait_for(|fault| *fault == Fault::Cut) => return Err(Reset),
        };
        if read == 0 {
            return to.shutdown().await.map_err(|_| Reset);
        }
        way.received.fetch_add(read as u64, Ordering::SeqCst);
        let mut piece = buffer[..read].to_vec();
        let broken = hold(&mut from, &mut piece, &mut fault, way).await?;
        let delay = match *fault.borrow() {
            Fault::Delay(delay) => delay,
            _ => Duration::ZERO,
        };
        tokio::time::sleep(delay).await;
        let outcome = apply(&way.fault, &mut piece);
        for _ in 0..outcome.times {
            to.write_all(&piece[..outcome.bytes]).await.map_err(|_| Reset)?;
            way.sent.fetch_add(outcome.bytes as u64, Ordering::SeqCst);
        }
        if outcome.reset || broken {
            return Err(Reset);
        }
    }
}

/// While bytes are held, take in what else comes, so that it counts, and hold it with `piece`. An end is held
/// too; tells whether it was none in order.
async fn hold(
    from: &mut OwnedReadHalf,
    piece: &mut Vec<u8>,
    fault: &mut watch::Receiver<Fault>,
    way: &Way,
) -> Result<bool, Reset> {
    let (mut buffer, mut ended, mut broken) = (vec![0; CHUNK], false, false);
    loop {
        tokio::select! {
            biased;
            released = fault.wait_for(|fault| *fault != Fault::Hold) => {
                return released.map(|_| broken).map_err(|_| Reset);
            }
            read = from.read(&mut buffer), if !ended => {
                let bytes = *read.as_ref().unwrap_or(&0);
                (ended, broken) = (bytes == 0, read.is_err());
                way.received.fetch_add(bytes as u64, Ordering::SeqCst);
                piece.extend_from_slice(&buffer[..bytes]);
            }
        }
    }
}

/// What becomes of a piece: how many of its bytes are sent how often, and whether the connection goes on.
struct Outcome {
    bytes: usize,
    times: usize,
    reset: bool,
}

/// Do to a piece what the fault says, and count down faults that happen once.
fn apply(fault: &watch::Sender<Fault>, piece: &mut [u8]) -> Outcome {
    let mut outcome = Outcome { bytes: piece.len(), times: 1, reset: false };
    fault.send_if_modified(|fault| {
        match *fault {
            Fault::None | Fault::Delay(_) | Fault::Hold => {}
            Fault::Drop => outcome.times = 0,
            Fault::Duplicate => outcome.times = 2,
            Fault::Cut => (outcome.times, outcome.reset) = (0, true),
            Fault::CutAfter(left) if left < piece.len() as u64 => {
                (outcome.bytes, outcome.reset) = (left as usize, true);
                *fault = Fault::None;
            }
            Fault::CutAfter(left) => *fault = Fault::CutAfter(left - piece.len() as u64),
            Fault::FlipAfter(left) if left < piece.len() as u64 => {
                piece[left as usize] ^= 0x10;
                *fault = Fault::None;
            }
            Fault::FlipAfter(left) => *fault = Fault::FlipAfter(left - piece.len() as u64),
        }
        false
    });
    outcome
}
