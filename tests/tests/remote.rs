//! Roles joined by gRPC give what roles in one process give: the same entries, bit for bit, and the same answers, cold,
//! warm, from another member's memory, and when members are lost on the way.

use hypic_cache::EntryKey;
use hypic_kernels::Cpu;
use hypic_proto::v1;
use hypic_proto::v1::combine_client::CombineClient;
use hypic_proto::v1::transfer_message::Message;
use hypic_router::{Engine, Event, Request, RouterConfig, SegmentSource};
use hypic_state::LayerKind;
use hypic_state::codec::{FORMAT_VERSION, encode};
use hypic_tests::Random;
use hypic_tests::ask::{ask, same_answer, tokens};
use hypic_tests::cluster::{Cluster, Setup, entry_bytes, key_space};
use hypic_tests::remote::{Remotes, patient};
use tonic::Code;

const VOCAB: usize = 1746;
const ANCHOR: [u32; 2] = [5, 6];

fn segments(seed: u64) -> Vec<Vec<u32>> {
    let mut random = Random(seed);
    [20, 40, 90, 40, 300].map(|n| random.tokens(n, VOCAB)).to_vec()
}

fn request(seed: u64) -> Request {
    let mut request = tokens(segments(seed), Random(seed + 1).tokens(3, VOCAB), ANCHOR.to_vec());
    request.max_tokens = Some(6);
    request
}

fn key(remotes: &Remotes, segment: &[u32], anchor: &[u32]) -> EntryKey {
    EntryKey::new(&key_space(&remotes.model), 8, anchor, b"", segment)
}

async fn want(request: &Request) -> hypic_tests::ask::Choice {
    let cluster = Cluster::start(Setup { workers: 1, cache_bytes: 0, ..Setup::default() });
    ask(&cluster.router, request.clone()).await.expect("an answer").choices.remove(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn entries_and_answers_are_those_of_one_process() {
    let local = Cluster::start(Setup::default());
    let want = ask(&local.router, request(1)).await.expect("an answer").choices.remove(0);
    for workers in [1, 2, 8] {
        let remotes = Remotes::start(workers, 1, patient()).await;
        let cold = ask(&remotes.router, request(1)).await.expect("an answer");
        same_answer(&format!("{workers} workers, cold"), cold.ids(), &want);
        for told in &cold.report.segments {
            assert_eq!(told.source, SegmentSource::Computed);
            assert!(told.worker.as_ref().is_some_and(|w| w.starts_with("worker-")), "{told:?}");
        }
        remotes.settle().await;
        let backend = Cpu::new(1);
        for (i, segment) in segments(1).iter().enumerate() {
            let anchor: &[u32] = if i == 0 { &[] } else { &ANCHOR };
            let expected = local.entry(segment, 8, anchor).expect("the local cluster keeps it");
            let key = key(&remotes, segment, anchor);
            let at_combiner = remotes.combiners[0].store.get(key, &segment.as_slice().into()).expect("it was sent");
            assert!(entry_bytes(&backend, &at_combiner) == expected, "segment {i} at the combiner");
            let holders = remotes.workers.iter().filter_map(|w| w.store.get(key, &segment.as_slice().into()));
            let held: Vec<_> = holders.map(|entry| entry_bytes(&backend, &entry)).collect();
            assert_eq!(held.len(), 1, "computed once");
            assert!(held[0] == expected, "segment {i} at its worker");
        }
        remotes.directory_settled().await;

        let mut other = request(1);
        if let hypic_router::Prompt::Tokens { segments, .. } = &mut other.prompt {
            segments[1..].reverse();
        }
        let wanted = self::want(&other).await;
        let warm = ask(&remotes.router, other).await.expect("an answer");
        same_answer("warm", warm.ids(), &wanted);
        for told in &warm.report.segments[1..] {
            assert_eq!((told.source, told.worker.as_deref()), (SegmentSource::Memory, Some("combiner-0")));
        }
        remotes.settle().await;
    }
}

/// What one combiner does not have comes from the worker that does, and is not computed again.
#[tokio::test(flavor = "multi_thread")]
async fn another_combiner_gets_entries_from_their_holders() {
    let remotes = Remotes::start(2, 2, RouterConfig::default()).await;
    let want = want(&request(2)).await;
    let first = ask(&remotes.router, request(2)).await.expect("an answer");
    same_answer("first", first.ids(), &want);
    remotes.settle().await;
    remotes.directory_settled().await;
    let used = remotes.combiners.iter().position(|c| c.store.stats().entries > 0).expect("one has them");
    remotes.combiners[used].behind.drain();
    let second = ask(&remotes.router, request(2)).await.expect("an answer");
    same_answer("second", second.ids(), &want);
    let remote = second.report.segments.iter().filter(|s| s.source == SegmentSource::Remote).count();
    assert_eq!(remote, 5, "{:?}", second.report.segments);
    remotes.settle().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_workers_the_combiner_computes() {
    let remotes = Remotes::start(0, 1, RouterConfig::default()).await;
    let answer = ask(&remotes.router, request(3)).await.expect("an answer");
    same_answer("no workers", answer.ids(), &want(&request(3)).await);
    for told in &answer.report.segments {
        assert_eq!((told.source, told.worker.as_deref()), (SegmentSource::Computed, Some("combiner-0")));
    }
    remotes.settle().await;
}

/// A combiner that is lost before or while it answers: the client sees one answer, as if nothing had been.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_combiner_is_replaced_in_the_middle_of_an_answer() {
    for temperature in [0.0, 1.0] {
        let mut request = request(4);
        request.max_tokens = Some(200);
        request.stop_at_eos = false;
        request.sampling.temperature = Some(temperature);
        request.sampling.seed = Some(11);
        let want = want(&request).await;
        let remotes = Remotes::start(2, 2, RouterConfig::default()).await;
        let mut answer = remotes.router.generate(request).await.expect("taken");
        let (mut got, mut killed) = (Vec::new(), false);
        loop {
            match answer.events.recv().await.expect("an end") {
                Event::Delta(delta) => got.extend(delta.token_ids),
                Event::Report(_) => break,
                Event::Finished { .. } => {}
                Event::Failed(error) => panic!("{error}"),
            }
            if got.len() >= 20 && !killed {
                killed = true;
                let busy = remotes.combiners.iter().find(|c| c.store.stats().entries > 0).expect("one is busy");
                busy.behind.kill();
            }
        }
        assert!(killed);
        assert_eq!(got, want.token_ids, "temperature {temperature}");
        remotes.settle().await;
    }
}

/// Transfers that lie, break off, come late or twice: refused by name, and nothing of them is kept.
#[tokio::test(flavor = "multi_thread")]
async fn bad_transfers_are_refused_and_leave_nothing() {
    let remotes = Remotes::start(1, 1, RouterConfig::default()).await;
    ask(&remotes.router, request(5)).await.expect("an answer");
    remotes.settle().await;
    let segment = segments(5).remove(4);
    let key = key(&remotes, &segment, &ANCHOR);
    let entry = remotes.workers[0].store.get(key, &segment.as_slice().into()).expect("kept");
    let backend = Cpu::new(1);
    let parts: Vec<_> = entry.parts().iter().map(|p| encode(&hypic_kernels::part_to_host(&backend, p))).collect();

    let node = &remotes.combiners[0];
    let fresh = Random(99).tokens(segment.len(), VOCAB);
    let other_key = self::key(&remotes, &fresh, &ANCHOR);
    let transfer = v1::TransferId { id: 77, generation: 1 };
    // The parts of one entry under the name of another: what a receiver can tell is all that it has of them.
    let identity = v1::EntryIdentity {
        key: bytes::Bytes::copy_from_slice(other_key.as_bytes()),
        token_ids: fresh.clone(),
        seam: 8,
        anchor_ids: ANCHOR.to_vec(),
        salt_hash: bytes::Bytes::new(),
    };
    let space = key_space(&remotes.model);
    let header = v1::TransferHeader {
        transfer: Some(transfer),
        entry: Some(identity.clone()),
        format_version: u32::from(FORMAT_VERSION),
        model_fingerprint: bytes::Bytes::copy_from_slice(&space.fingerprint.0),
        layers: parts.len() as u32,
    };
    let chunk = |layer: usize, data: bytes::Bytes| v1::PartChunk {
        transfer: Some(transfer),
        key: identity.key.clone(),
        layer: layer as u32,
        kind: match remotes.model.layout()[layer] {
            LayerKind::Recurrent => v1::PartKind::Recurrent as i32,
            LayerKind::Attention => v1::PartKind::Attention as i32,
        },
        token_begin: 8,
        token_end: fresh.len() as u32,
        offset: 0,
        part_bytes: data.len() as u64,
        crc32c: crc32c::crc32c(&data),
        data,
    };
    let good: Vec<Message> = parts.iter().enumerate().map(|(i, p)| Message::Chunk(chunk(i, p.clone()))).collect();
    let with = |change: &dyn Fn(&mut Vec<Message>)| {
        let mut messages = vec![Message::Header(header.clone())];
        messages.extend(good.clone());
        messages.push(Message::End(v1::TransferEnd::default()));
        change(&mut messages);
        messages
    };
    let edit = |index: usize, change: fn(&mut v1::PartChunk)| {
        with(&move |m| {
            let Message::Chunk(chunk) = &mut m[index] else { unreachable!("a chunk") };
            change(chunk);
        })
    };
    let cases: Vec<(&str, Code, Vec<Message>)> = vec![
        ("no header", Code::InvalidArgument, with(&|m| drop(m.remove(0)))),
        ("cut", Code::DataLoss, with(&|m| m.truncate(2))),
        ("ended early", Code::DataLoss, with(&|m| drop(m.remove(2)))),
        ("twice", Code::DataLoss, with(&|m| m.insert(2, m[1].clone()))),
        ("aborted", Code::Aborted, with(&|m| m[2] = Message::Abort(v1::TransferAbort::default()))),
        (
            "flipped",
            Code::DataLoss,
            edit(2, |c| {
                let mut data = c.data.to_vec();
                data[100] ^= 4;
                c.data = data.into();
            }),
        ),
        ("of another kind", Code::DataLoss, edit(1, |c| c.kind = 2)),
        ("beyond the body", Code::DataLoss, edit(4, |c| c.token_end += 1)),
        ("fewer tokens than it says", Code::DataLoss, edit(4, |c| c.token_begin += 1)),
        ("another entry", Code::InvalidArgument, edit(1, |c| c.key = vec![0; 32].into())),
        ("beyond its part", Code::DataLoss, edit(1, |c| c.part_bytes = 10)),
        (
            "a part of nothing",
            Code::DataLoss,
            edit(1, |c| {
                c.data = vec![1; 64].into();
                (c.part_bytes, c.crc32c) = (64, crc32c::crc32c(&c.data));
            }),
        ),
        (
            "another format",
            Code::InvalidArgument,
            with(&|m| {
                let Message::Header(header) = &mut m[0] else { unreachable!("a header") };
                header.format_version += 1;
            }),
        ),
        (
            "another model",
            Code::InvalidArgument,
            with(&|m| {
                let Message::Header(header) = &mut m[0] else { unreachable!("a header") };
                header.model_fingerprint = vec![9; 32].into();
            }),
        ),
        (
            "other tokens",
            Code::InvalidArgument,
            with(&|m| {
                let Message::Header(header) = &mut m[0] else { unreachable!("a header") };
                header.entry.as_mut().expect("named").token_ids[9] ^= 1;
            }),
        ),
    ];
    let channel = hypic_transport::grpc::Remote::channel(&*node.behind);
    let send = async |messages: Vec<Message>| {
        let messages = messages.into_iter().map(|m| v1::TransferMessage { message: Some(m) });
        CombineClient::new(channel.clone()).receive(tokio_stream::iter(messages.collect::<Vec<_>>())).await
    };
    let before = node.store.stats().entries;
    let incoming = node.exchange.open(77);
    for (what, code, messages) in cases {
        let status = send(messages).await.expect_err(what);
        assert_eq!(status.code(), code, "{what}: {status}");
        assert_eq!((node.store.stats().flights, node.store.stats().entries), (0, before), "{what}");
    }
    // The last one is as it should be.
    assert!(send(with(&|_| {})).await.expect("taken").into_inner().used);
    assert_eq!(node.store.stats().entries, before + 1);
    let again = send(with(&|_| {})).await.expect("it has it already").into_inner();
    assert!(!again.used);
    drop(incoming);
    let late = send(with(&|_| {})).await.expect_err("the request has ended");
    assert_eq!(late.code(), Code::FailedPrecondition, "{late}");
    drop(entry);
    remotes.settle().await;
}
