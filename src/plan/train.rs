//! Buckets that go together: their sums are made at the same places of their programs and share a message.

use super::arena::{Place, sizes};
use super::bucket::Bucket;
use super::hop::{Hop, HopKind, Segment, Step};
use super::route::Route;
use crate::dtype::DType;
use crate::layout::Reduction;

/// A collective: one hop, or the sums of several buffers in one message.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Call {
    /// The hops, each with its bucket.
    pub(super) hops: Vec<(usize, Hop)>,
    /// The number of the message within the train where buffers travel apart from their places.
    pub(super) message: Option<usize>,
}

/// What is done until something is sent, and what then is in flight.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Stop {
    /// The steps of buckets.
    pub(super) computes: Vec<(usize, Vec<Step>)>,
    /// The collectives.
    pub(super) calls: Vec<Call>,
}

/// A bucket, or several that go together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Train {
    /// The buckets.
    pub(super) buckets: Vec<usize>,
    /// Bytes of the buffers and messages of each.
    pub(super) sizes: Vec<Vec<usize>>,
    /// The common messages: of each the parts, by place of the bucket among `buckets` and bytes, in the order of the
    /// numbers that their hops give.
    pub(super) messages: Vec<Vec<(usize, usize, usize)>>,
    /// What is done.
    pub(super) stops: Vec<Stop>,
}

/// Joins buckets into trains: those that take parameters whole and have to meet into one, in place of the first of
/// them; every other one alone.
#[must_use]
pub(super) fn trains(buckets: &[Bucket], segments: &[Vec<Segment>]) -> Vec<Train> {
    let together: Vec<usize> =
        (0..buckets.len()).filter(|&b| buckets[b].joint && segments[b].len() > 1).collect();
    let mut trains = Vec::new();
    for bucket in 0..buckets.len() {
        if together.first() == Some(&bucket) {
            trains.push(train(buckets, segments, &together));
        } else if !together.contains(&bucket) {
            trains.push(train(buckets, segments, &[bucket]));
        }
    }
    trains
}

fn train(buckets: &[Bucket], segments: &[Vec<Segment>], members: &[usize]) -> Train {
    let mut train = Train {
        buckets: members.to_vec(),
        sizes: members.iter().map(|&b| sizes(&buckets[b], &segments[b])).collect(),
        ..Train::default()
    };
    if let [alone] = members
        && !buckets[*alone].joint
    {
        let call = |hop: &Hop| Call { hops: vec![(*alone, hop.clone())], message: None };
        let stop = |s: &Segment| Stop {
            computes: if s.steps.is_empty() { Vec::new() } else { vec![(*alone, s.steps.clone())] },
            calls: s.hops.iter().map(call).collect(),
        };
        train.stops = segments[*alone].iter().map(stop).collect();
        return train;
    }
    let mut meetings: Vec<(usize, usize)> =
        members.iter().flat_map(|&b| segments[b].iter().map(|s| s.at)).collect();
    meetings.sort_unstable();
    meetings.dedup();
    for at in meetings {
        let mut stop = Stop::default();
        for &b in members {
            let Some(segment) = segments[b].iter().find(|s| s.at == at) else { continue };
            if !segment.steps.is_empty() {
                stop.computes.push((b, segment.steps.clone()));
            }
            for hop in &segment.hops {
                train.call(buckets, &mut stop.calls, b, hop);
            }
        }
        train.stops.push(stop);
    }
    train
}

impl Train {
    /// Adds a hop to a collective that goes the same way, or begins one.
    fn call(&mut self, buckets: &[Bucket], calls: &mut Vec<Call>, bucket: usize, hop: &Hop) {
        let of = |b: usize, hop: &Hop| -> (Vec<u64>, DType) {
            let spec = &buckets[b].program.buffers[hop.buffer];
            (buckets[b].axis(hop.axis).ranks.clone(), hop.dtype(spec))
        };
        if hop.kind != (HopKind::AllReduce { how: Reduction::Sum }) {
            calls.push(Call { hops: vec![(bucket, hop.clone())], message: None });
            return;
        }
        let elements: usize = Route::new(&buckets[bucket], hop).counts().send.iter().sum();
        let (way, dtype) = of(bucket, hop);
        let part = |members: &[usize]| {
            let at = members.iter().position(|&b| b == bucket).unwrap_or(0);
            (at, hop.message, elements * dtype.bytes())
        };
        let part = part(&self.buckets);
        let same = |call: &&mut Call| {
            call.message.is_some()
                && call.hops.first().is_some_and(|(b, h)| of(*b, h) == (way.clone(), dtype))
        };
        if let Some(call) = calls.iter_mut().find(same) {
            call.hops.push((bucket, hop.clone()));
            self.messages[call.message.unwrap_or(0)].push(part);
        } else {
            calls.push(Call { hops: vec![(bucket, hop.clone())], message: Some(self.messages.len()) });
            self.messages.push(vec![part]);
        }
    }

    /// The places of every bucket's buffers and messages from byte `offset` on, by bucket, those of the common messages,
    /// and the end.
    pub(super) fn places(&self, mut offset: usize, align: usize) -> (Vec<Vec<Place>>, Vec<Place>, usize) {
        let mut take = |bytes: usize| {
            let place = Place { offset, bytes };
            offset += bytes.next_multiple_of(align);
            place
        };
        let mut places: Vec<Vec<Place>> =
            self.sizes.iter().map(|sizes| sizes.iter().map(|&bytes| take(bytes)).collect()).collect();
        let mut common = Vec::with_capacity(self.messages.len());
        let mut parts: Vec<(usize, usize, Place)> = Vec::new();
        for message in &self.messages {
            let whole = take(message.iter().map(|(_, _, bytes)| bytes).sum());
            let mut at = whole.offset;
            for &(bucket, number, bytes) in message {
                parts.push((bucket, number, Place { offset: at, bytes }));
                at += bytes;
            }
            common.push(whole);
        }
        // A hop's message `number` is at that place behind the bucket's own messages.
        parts.sort_by_key(|(bucket, number, _)| (*bucket, *number));
        for (bucket, _, place) in parts {
            places[bucket].push(place);
        }
        (places, common, offset)
    }
}
