//! A member's signs of life, and when it counts as lost: silent too long, its stream broken, or somebody else in its
//! place.

use std::time::Duration;

use futures::{Stream, StreamExt};
use hypic_proto::v1;
use tokio::time::timeout;
use tonic::Status;

use crate::expected::Mismatch;
use crate::record::RecordError;

/// Why a connection counts as lost.
#[derive(Debug, thiserror::Error)]
pub(super) enum Lost {
    #[error("silent for {0:?}")]
    Silent(Duration),
    #[error("it ended its heartbeats")]
    Ended,
    #[error("the connection broke: {}", .0.message())]
    Broken(Status),
    #[error("{0} answers in its place")]
    Another(String),
    #[error("what it loaded does not fit: {0}")]
    Misfit(Mismatch),
    #[error(transparent)]
    Record(#[from] RecordError),
}

/// Pass heartbeats on until the member counts as lost.
pub(super) async fn attend_beats<S>(
    beats: &mut S,
    id: &str,
    limit: Duration,
    mut beat: impl FnMut(v1::Heartbeat) -> Result<(), Lost>,
) -> Lost
where
    S: Stream<Item = Result<v1::Heartbeat, Status>> + Unpin,
{
    loop {
        if let Err(lost) = next_beat(beats, id, limit).await.and_then(&mut beat) {
            return lost;
        }
    }
}

pub(super) async fn next_beat<S>(beats: &mut S, id: &str, limit: Duration) -> Result<v1::Heartbeat, Lost>
where
    S: Stream<Item = Result<v1::Heartbeat, Status>> + Unpin,
{
    match timeout(limit, beats.next()).await {
        Err(_) => Err(Lost::Silent(limit)),
        Ok(None) => Err(Lost::Ended),
        Ok(Some(Err(status))) => Err(Lost::Broken(status)),
        Ok(Some(Ok(beat))) if beat.id != id => Err(Lost::Another(beat.id)),
        Ok(Some(Ok(beat))) => Ok(beat),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::stream;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, sleep};

    fn beat(id: &str) -> Result<v1::Heartbeat, Status> {
        Ok(v1::Heartbeat { id: id.into(), ..Default::default() })
    }

    #[tokio::test(start_paused = true)]
    async fn a_member_is_lost_when_heartbeats_stop() {
        let (sender, mut receiver) = mpsc::unbounded_channel();
        let mut beats = stream::poll_fn(move |context| receiver.poll_recv(context));
        let limit = Duration::from_secs(3);
        let start = Instant::now();
        tokio::spawn(async move {
            for _ in 0..5 {
                sender.send(beat("a")).expect("is read");
                sleep(Duration::from_millis(2900)).await;
            }
            std::future::pending::<()>().await;
            drop(sender);
        });
        let mut seen = 0;
        let count = |_| {
            seen += 1;
            Ok(())
        };
        let lost = attend_beats(&mut beats, "a", limit, count).await;
        assert!(matches!(lost, Lost::Silent(_)), "{lost}");
        assert_eq!(seen, 5);
        let expected = 4 * Duration::from_millis(2900) + limit;
        assert!(start.elapsed() >= expected && start.elapsed() < expected + Duration::from_millis(50));
    }

    #[tokio::test]
    async fn a_member_is_lost_when_another_answers_or_the_stream_breaks() {
        let limit = Duration::from_secs(3);
        let mut other = stream::iter([beat("a"), beat("b")]);
        assert!(matches!(attend_beats(&mut other, "a", limit, |_| Ok(())).await, Lost::Another(id) if id == "b"));
        let mut broken = stream::iter([beat("a"), Err(Status::unavailable("gone"))]);
        assert!(matches!(attend_beats(&mut broken, "a", limit, |_| Ok(())).await, Lost::Broken(_)));
        let mut ended = stream::iter([beat("a")]);
        assert!(matches!(attend_beats(&mut ended, "a", limit, |_| Ok(())).await, Lost::Ended));
    }
}
