//! Plans as messages.

use std::sync::Arc;
use std::time::Instant;

use hypic_proto::v1;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::Status;

use super::convert::{self, invalid, key_bytes};
use super::{deadline, left_ms};
use crate::{GenerationEvent, Plan, PlanChoice, PlanSegment, PrefixHit, SamplingParams, SavePoint, SegmentBody};

/// What of a plan travels.
pub(super) fn to_message(plan: &Plan) -> v1::CombineRequest {
    let sampling = plan.choices.first().map(|c| convert::sampling_message(&c.sampling));
    let choice = |c: &PlanChoice| v1::Choice {
        index: c.sampling.choice,
        told: c.told.clone(),
        complete: c.cancel.is_cancelled(),
    };
    let save = |s: &SavePoint| v1::PrefixSave {
        position: s.position as u32,
        key: key_bytes(s.key.as_bytes()),
        kind: convert::save_kind_message(s.kind),
    };
    let resume = |hit: &PrefixHit| v1::PrefixResume {
        key: key_bytes(hit.key.as_bytes()),
        tokens: hit.tokens as u32,
        exact: hit.exact as u32,
    };
    v1::CombineRequest {
        request_id: plan.request.to_string(),
        items: plan.segments.iter().map(item).collect(),
        query_ids: plan.query.clone(),
        compose: convert::rule_message(plan.rule),
        resume: plan.resume.as_ref().map(resume),
        prefix_root: key_bytes(plan.root.as_bytes()),
        saves: plan.saves.iter().map(save).collect(),
        sampling,
        choices: plan.choices.iter().map(choice).collect(),
        prompt_ids: plan.prompt_ids.clone(),
        max_tokens: plan.max_tokens as u32,
        end_ids: plan.eos.to_vec(),
        deadline_ms: left_ms(plan.deadline),
    }
}

fn item(segment: &PlanSegment) -> v1::PlanItem {
    let entry = match segment.body {
        SegmentBody::Rows => None,
        SegmentBody::Entry { seam, key, transfer, held } => Some(v1::PlanEntry {
            key: key_bytes(key.as_bytes()),
            seam: seam as u32,
            transfer: convert::transfer_message(transfer),
            held,
        }),
    };
    v1::PlanItem { token_ids: segment.tokens.to_vec(), entry }
}

/// A plan that has travelled, checked against a vocabulary of `vocab` tokens.
pub(super) fn from_message(
    message: v1::CombineRequest,
    vocab: usize,
    cancel: &CancellationToken,
    events: mpsc::UnboundedSender<GenerationEvent>,
) -> Result<Plan, Status> {
    let segments: Vec<PlanSegment> = message.items.into_iter().map(segment).collect::<Result<_, _>>()?;
    let ids = segments.iter().flat_map(|s| s.tokens.iter()).chain(&message.query_ids).chain(&message.prompt_ids);
    let told = message.choices.iter().flat_map(|c| &c.told);
    if let Some(id) = ids.chain(told).copied().find(|&id| id as usize >= vocab) {
        return Err(invalid(format!("token id {id} is not in the vocabulary of {vocab}")));
    }
    if message.query_ids.is_empty() {
        return Err(invalid("query_ids: at least one is needed"));
    }
    if message.max_tokens == 0 {
        return Err(invalid("max_tokens: at least 1"));
    }
    if message.choices.is_empty() {
        return Err(invalid("choices: at least one is needed"));
    }
    let sampling = convert::sampling(message.sampling.ok_or_else(|| invalid("sampling: missing"))?)?;
    sampling.validate_vocabulary(vocab).map_err(|e| invalid(format!("sampling: {}: {}", e.field, e.message)))?;
    let choices = message.choices.into_iter().map(|c| {
        let own = cancel.child_token();
        if c.complete {
            own.cancel();
        }
        PlanChoice { sampling: SamplingParams { choice: c.index, ..sampling.clone() }, told: c.told, cancel: own }
    });
    let resume = message.resume.map(|r| {
        let key = convert::prefix_key(&r.key)?;
        Ok::<_, Status>(PrefixHit { key, tokens: r.tokens as usize, exact: r.exact as usize })
    });
    let resume = resume.transpose()?;
    let start = resume.map_or(0, |hit| hit.tokens);
    let end = start + segments.iter().map(|s| s.tokens.len()).sum::<usize>() + message.query_ids.len();
    let saves = saves(message.saves, start, end)?;
    Ok(Plan {
        request: message.request_id.into(),
        arrived: Instant::now(),
        resume,
        segments,
        query: message.query_ids,
        rule: convert::rule(message.compose)?,
        root: convert::prefix_key(&message.prefix_root)?,
        saves,
        choices: choices.collect(),
        prompt_ids: message.prompt_ids,
        eos: message.end_ids.into(),
        max_tokens: message.max_tokens as usize,
        deadline: deadline(message.deadline_ms),
        cancel: cancel.clone(),
        events,
    })
}

fn saves(messages: Vec<v1::PrefixSave>, start: usize, end: usize) -> Result<Vec<SavePoint>, Status> {
    let mut saves: Vec<SavePoint> = Vec::with_capacity(messages.len());
    for save in messages {
        let position = save.position as usize;
        let after = saves.last().map_or(start, |s| s.position);
        if position <= after || position > end {
            return Err(invalid(format!("saves: {position} is not in ascending order between {start} and {end}")));
        }
        let (key, kind) = (convert::prefix_key(&save.key)?, convert::save_kind(save.kind)?);
        saves.push(SavePoint { position, key, kind });
    }
    Ok(saves)
}

fn segment(item: v1::PlanItem) -> Result<PlanSegment, Status> {
    let tokens: Arc<[u32]> = item.token_ids.into();
    let Some(entry) = item.entry else {
        return Ok(PlanSegment { tokens, body: SegmentBody::Rows });
    };
    let seam = entry.seam as usize;
    if tokens.len() <= seam {
        return Err(invalid(format!("items: {} tokens have no body behind a seam of {seam}", tokens.len())));
    }
    let (key, transfer) = (convert::entry_key(&entry.key)?, convert::transfer_id(entry.transfer)?);
    Ok(PlanSegment { tokens, body: SegmentBody::Entry { seam, key, transfer, held: entry.held } })
}
