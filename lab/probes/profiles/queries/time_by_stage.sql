-- Which stage takes the GPU's time: microseconds and kernels a step by the innermost range whose calls asked for them.
-- A moment in which kernels overlap counts once, for the kernel that began first, so the shares add up to 1.
WITH
  steps AS (
    SELECT COUNT(*) AS n FROM slice WHERE category = 'user_annotation' AND name = 'eagle3lab step'
  ),
  ranges AS (
    SELECT ts, dur,
      CASE WHEN name GLOB 'target.[0-9]*.*' THEN 'target.' || SUBSTR(name, INSTR(SUBSTR(name, 8), '.') + 8)
      ELSE name END AS stage
    FROM slice WHERE category = 'user_annotation' AND name != 'eagle3lab step'
  ),
  calls AS (
    SELECT id, ts, EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation
    FROM slice WHERE category IN ('cuda_runtime', 'cuda_driver')
  ),
  asked AS (  -- of the ranges around a call, the shortest
    SELECT calls.correlation, ranges.stage, MIN(ranges.dur) AS shortest
    FROM calls JOIN ranges ON calls.ts BETWEEN ranges.ts AND ranges.ts + ranges.dur
    WHERE calls.correlation IS NOT NULL
    GROUP BY calls.id
  ),
  busy AS (
    SELECT ts, dur, EXTRACT_ARG(arg_set_id, 'args.correlation') AS correlation,
      MAX(ts + dur) OVER (ORDER BY ts, dur DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before
    FROM slice WHERE category = 'kernel'
  ),
  kernels AS (
    SELECT correlation, MAX(0, ts + dur - MAX(ts, COALESCE(before, ts))) AS own FROM busy
  )
SELECT
  COALESCE(asked.stage, '(no range)') AS stage,
  ROUND(SUM(own) / 1e3 / steps.n, 1) AS us_a_step,
  ROUND(1.0 * SUM(own) / SUM(SUM(own)) OVER (), 4) AS share,
  ROUND(1.0 * COUNT(*) / steps.n, 1) AS kernels_a_step
FROM steps, kernels LEFT JOIN asked USING (correlation)
GROUP BY 1
ORDER BY SUM(own) DESC;
