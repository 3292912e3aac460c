//! Connections to members. Owns one task per target of the membership's view: it dials, asks who answers, compares, and
//! follows heartbeats until the connection counts as lost; then it backs off and begins again. Nothing here fails for
//! good: a member that does not fit is left out, logged once with both values and counted.

mod beats;
mod visit;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backoff::BackoffConfig;
use crate::board::{Board, Live, Peer};
use crate::dialer::Dialer;
use crate::expected::{Expected, Mismatches};
use crate::membership::{Target, View};
use crate::record::{MemberId, Role};
use visit::Visitor;

/// How members are watched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PeersConfig {
    /// A member that is silent for so long is down; also the time to say who it is.
    #[serde(with = "humantime_serde")]
    pub keep_alive: Duration,
    /// Waits between attempts to reach a member.
    pub reconnect: BackoffConfig,
}

impl Default for PeersConfig {
    fn default() -> Self {
        PeersConfig { keep_alive: Duration::from_secs(3), reconnect: BackoffConfig::default() }
    }
}

/// Who dials, and whom.
#[derive(Clone, Debug)]
pub struct Caller {
    /// Own id; a target that turns out to be this process itself is left out.
    pub id: MemberId,
    /// Own role.
    pub role: Role,
    /// Members of these roles are dialled.
    pub dials: Vec<Role>,
}

/// The connections to all members of the view. Dropping it ends them.
#[derive(Debug)]
pub struct Peers {
    board: Arc<Board>,
    mismatches: Arc<Mismatches>,
    _stop: DropGuard,
}

impl Peers {
    /// Dial the members of `view`, now and as it changes. Members that differ from `expected` are not used. Needs a
    /// tokio runtime.
    pub fn start(
        config: PeersConfig,
        caller: Caller,
        expected: Expected,
        dialer: Dialer,
        view: watch::Receiver<View>,
    ) -> Peers {
        let (board, mismatches, stop) = (Board::new(), Arc::new(Mismatches::default()), CancellationToken::new());
        let visitor =
            Visitor { config, caller, expected, dialer, board: board.clone(), mismatches: mismatches.clone() };
        let stopped = stop.clone();
        tokio::spawn(async move { stopped.run_until_cancelled(supervise(Arc::new(visitor), view)).await });
        Peers { board, mismatches, _stop: stop.drop_guard() }
    }

    /// The live members that fit, ordered by id. Changes when one comes, goes, changes its state or its listing; loads
    /// are read from the members.
    pub fn live(&self) -> watch::Receiver<Arc<[Arc<Peer>]>> {
        let live: watch::Receiver<Live> = self.board.live();
        live
    }

    /// The live member of that id.
    pub fn find(&self, id: &str) -> Option<Arc<Peer>> {
        self.board.find(id)
    }

    /// Counts of members that did not fit.
    pub fn mismatches(&self) -> &Arc<Mismatches> {
        &self.mismatches
    }
}

/// What makes a target the same one in two views: the id, and without one the address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Id(MemberId),
    Addresses(Role, Vec<String>),
}

impl Key {
    fn of(target: &Target) -> Key {
        match &target.record {
            Some(record) => Key::Id(record.id.clone()),
            None => Key::Addresses(target.role, target.addresses.clone()),
        }
    }
}

/// Keep one task per target. A task is told when its target leaves the view and ends by itself once its connection is
/// lost; dropping this ends all.
async fn supervise(visitor: Arc<Visitor>, mut view: watch::Receiver<View>) {
    let mut attended: HashMap<Key, watch::Sender<Option<Target>>> = HashMap::new();
    let mut tasks = JoinSet::new();
    let mut view_ended = false;
    loop {
        let targets = view.borrow_and_update().clone();
        let mut listed: HashMap<Key, Target> =
            targets.iter().filter(|target| visitor.wants(target)).map(|t| (Key::of(t), t.clone())).collect();
        for (key, told) in &attended {
            let target = listed.remove(key);
            told.send_if_modified(|known| {
                let changed = *known != target;
                *known = target;
                changed
            });
        }
        for (key, target) in listed {
            let (told, told_here) = watch::channel(Some(target));
            let before = attended.insert(key, told);
            debug_assert!(before.is_none(), "targets that are attended were taken out");
            let visitor = visitor.clone();
            tasks.spawn(async move { visitor.attend(told_here).await });
        }
        tokio::select! {
            // The sender of a fixed view may be gone: what it said last holds.
            changed = view.changed(), if !view_ended => view_ended = changed.is_err(),
            Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                if let Err(error) = ended {
                    tracing::error!(%error, "a connection's task failed and is begun again");
                }
                // Back in the view meanwhile? The next round finds out.
                attended.retain(|_, told| !told.is_closed());
            }
            else => std::future::pending().await,
        }
    }
}
