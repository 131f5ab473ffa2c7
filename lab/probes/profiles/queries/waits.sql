-- What waits, copies to the host or allocates inside a step, and in which range: a step may wait once, outside all.
WITH
  steps AS (
    SELECT ts, ts + dur AS until, ROW_NUMBER() OVER (ORDER BY ts) AS step
    FROM slice WHERE category = 'user_annotation' AND name = 'eagle3lab step'
  ),
  waits AS (
    SELECT id, ts, dur, name FROM slice
    WHERE category IN ('cuda_runtime', 'cuda_driver') AND (
      name GLOB '*Synchronize*' OR name GLOB '*EventQuery*' OR name GLOB '*StreamQuery*' OR name GLOB '*Malloc*'
      OR name GLOB '*Mem*Alloc*' OR name GLOB '*Free*'
    )
    OR category = 'gpu_memcpy' AND name GLOB '*DtoH*'
  )
SELECT
  steps.step, waits.name,
  COALESCE((
    SELECT inner_range.name FROM slice AS inner_range
    WHERE inner_range.category = 'user_annotation' AND inner_range.name != 'eagle3lab step'
      AND waits.ts BETWEEN inner_range.ts AND inner_range.ts + inner_range.dur
    ORDER BY inner_range.dur LIMIT 1
  ), '(outside all ranges)') AS in_range,
  ROUND(waits.dur / 1e3, 1) AS us,
  ROUND((waits.ts - steps.ts) / 1e3, 1) AS us_into_the_step
FROM waits JOIN steps ON waits.ts BETWEEN steps.ts AND steps.until
ORDER BY waits.ts;
