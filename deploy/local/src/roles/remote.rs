//! Members of the cluster as the transport sees them.

use std::sync::Arc;

use hypic_cluster::Peer;
use hypic_transport::grpc::Remote;
use hypic_transport::{CombineLoad, ToldBacklog};
use tokio_util::sync::CancellationToken;
use tonic::transport::Channel;

/// A live member.
pub(super) struct Member(pub Arc<Peer>);

impl Remote for Member {
    fn id(&self) -> &str {
        self.0.id().as_str()
    }

    fn channel(&self) -> Channel {
        self.0.channel()
    }

    fn down(&self) -> CancellationToken {
        self.0.down().clone()
    }

    fn is_serving(&self) -> bool {
        self.0.takes_work()
    }

    fn backlog(&self) -> Option<ToldBacklog> {
        let (load, heard) = self.0.load_heard();
        Some(ToldBacklog { tokens: load.backlog_tokens, heard })
    }

    fn load(&self) -> CombineLoad {
        let load = self.0.load();
        CombineLoad { waiting: load.waiting as usize, sequences: load.sequences as usize }
    }

    fn prefix_sizes(&self) -> (usize, usize, usize) {
        let record = self.0.record();
        let size = |bytes| usize::try_from(bytes).unwrap_or(usize::MAX);
        (size(record.prefix_fixed_bytes), size(record.prefix_token_bytes), size(record.prefix_budget_bytes))
    }
}
